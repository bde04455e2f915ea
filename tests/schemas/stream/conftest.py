from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.stream.memory import MemoryHub
from tests.schemas.stream.backends import Backend


@pytest.fixture(params=["memory", "local", pytest.param("kafka", marks=pytest.mark.kafka)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    match request.param:
        case "memory":
            found = Backend("memory", "memory://contract", across_processes=False, hub=MemoryHub())
        case "local":
            found = Backend("local", f"local://{tmp_path}/log.sqlite", across_processes=True)
        case _:
            bootstrap = request.getfixturevalue("kafka")
            found = Backend("kafka", f"kafka://{bootstrap}", across_processes=True)
    yield found
    found.close()
