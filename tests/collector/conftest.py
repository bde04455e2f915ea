"""Kernels are compiled before the first test that needs one: on a new machine that takes longer than a test may wait."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A short life of a whole collector."""
    from tests.collector.analytics.test_restart import collected, written  # here, since not every test has all of its packages

    folder = tmp_path_factory.mktemp("warm")
    with written(folder, sessions=2) as stream:
        collected(folder / "data", stream)
