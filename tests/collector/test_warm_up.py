"""What is compiled before READY is all that a collector needs: nothing is compiled in the middle of a commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core import event

from collector import warm_up

REAL_LIFE = """
import sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from collector.ingest import Collector
from collector.warm_up import warm_up
from tests.collector.analytics.test_restart import LONG, collected, written
from tests.collector.driven import settings


def ready():
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("collector", "schemas")]
    kernels = {v for m in modules for v in vars(m).values() if isinstance(v, Dispatcher)}
    return {(k.py_func.__module__, k.py_func.__name__, str(types)) for k in kernels for types in k.signatures}


folder = Path(sys.argv[1])
warm_up(lambda text: None)
known = ready()
with written(folder, sessions=2) as stream:
    victim = Collector(settings(folder / "data", **LONG, poll_records=400, checkpoint_blocks=200), stream)
    victim.start()
    while not victim._checkpoint:
        victim.turn()
    for _ in range(3):
        victim.turn()
    victim.close()  # as a crash would
    collected(folder / "data", stream)
needed = {name for _, name, _ in ready()}
assert {"_apply", "_look", "_walk", "_tell", "_measure", "_learn", "_heavy", "_read", "_unpack_ghosts"} <= needed, needed
for kernel in sorted(ready() - known):
    print(*kernel)
"""
"""Prints the kernels, with the types that they were called with, that warm_up did not make ready."""


def test_a_life_after_the_warm_up_compiles_nothing(tmp_path: Path) -> None:
    life = subprocess.run([sys.executable, "-c", REAL_LIFE, tmp_path], capture_output=True, text=True, check=False)
    assert life.returncode == 0, life.stderr
    assert life.stdout == ""


def test_it_says_so_only_when_something_has_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    warm_up.warm_up(said.append)
    said.clear()
    with event.install_listener("numba:compile", event.RecordingListener()) as compiled:
        warm_up.warm_up(said.append)
    assert (compiled.buffer, said) == ([], [])
    monkeypatch.setattr(warm_up, "_lives", lambda: numba.njit(lambda x: x + 1)(1))
    warm_up.warm_up(said.append)
    assert [text.split()[0] for text in said] == ["compiling", "kernels"]
