"""Kernels are compiled before the first test that needs one: on a new machine that takes longer than a client waits."""

from __future__ import annotations

import pytest

from router.warm_up import warm_up


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    warm_up()
