"""One collector a data folder: a lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderInUseError(Exception):
    """Another collector works in this folder; the message names its process."""


class FolderLock:
    def __init__(self, data_dir: Path) -> None:
        path = data_dir / "collector.lock"
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise FolderInUseError(
                f"setting `data_dir`: another collector (process {holder}) works in {data_dir}: stop it, or name another folder"
            ) from e
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
