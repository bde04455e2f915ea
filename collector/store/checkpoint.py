"""The state of the KV side as one file, written now and then, so that a restart need not read the whole stream again.

Five million blocks are about 80 MB: too much for each second's transaction. So the transaction stores offsets, and now and then the
*name* of a checkpoint with the offsets that it stands for. A restart loads it and reads kv-events again from there to the committed
offsets, without writing anything; applying events is deterministic, so the result is the state at the commit.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from collector.store.segments import sync_folder

Arrays = Mapping[str, npt.NDArray[Any]]


def write_checkpoint(folder: Path, number: int, saved: Arrays) -> str:
    """Writes and syncs; returns the file's name. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{number:012d}.npz"
    draft = folder / f"{name}.tmp"
    with draft.open("wb") as file:
        np.savez(file, **saved)  # type: ignore[arg-type]  # numpy's stub takes the names for its own flags
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / name)
    sync_folder(folder)
    return name


def read_checkpoint(folder: Path, name: str) -> dict[str, npt.NDArray[Any]]:
    """Raises OSError or ValueError when the file is missing or damaged."""
    try:
        with (folder / name).open("rb") as file, np.load(file) as found:
            return {key: found[key] for key in found.files}
    except (zipfile.BadZipFile, EOFError, KeyError) as e:
        raise ValueError(f"no whole checkpoint: {e}") from e


def sweep_checkpoints(folder: Path, keep: str | None) -> None:
    if folder.exists():
        for path in folder.iterdir():
            if path.name != keep:
                path.unlink()
