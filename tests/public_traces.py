"""Where the public traces are: the folder of WARMWATCH_TRACES, by default ../shared/data beside the checkout. Tests that need them carry
the marker `traces` and skip, visibly, where they are not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("WARMWATCH_TRACES", Path(__file__).parent.parent.parent / "shared" / "data"))


def trace(name: str) -> Path:
    """A file or folder of the traces; skips the test that asks when it is absent."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no public trace {name} in {FOLDER} (WARMWATCH_TRACES)")
    return path


def expected(name: str) -> dict[str, Any]:
    """Reference numbers that were computed on one trace with another program."""
    numbers: dict[str, Any] = json.loads(trace("expected.json").read_text())[name]
    return numbers
