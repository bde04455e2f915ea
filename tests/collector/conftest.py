"""Kernels are compiled before the first test that needs one: on a new machine that takes longer than a test may wait."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Usually done already, outside of a test's time: see the hook in tests/conftest.py."""
    from collector.warm_up import warm_up  # here, since not every test has all of its packages

    warm_up(lambda text: None)
