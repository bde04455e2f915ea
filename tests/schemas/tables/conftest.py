"""A published file made by the collector's own publisher, of rows that a test makes up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collector.store.publish import Publisher
from schemas.tables.read import FILE_NAME
from tests.schemas.tables.loss_rows import publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """published(folder, rows by table, **columns of the table published) -> the file in that folder. The publisher is made once."""
    made = tmp_path_factory.mktemp("publisher")
    publisher = Publisher(made, made / "segments")

    def into(folder: Path, tables: dict[str, list[dict[str, Any]]], **file: Any) -> Path:
        publish(publisher, tables, **file)
        return Path(shutil.copy(made / FILE_NAME, folder / FILE_NAME))

    yield into
    publisher.close()
