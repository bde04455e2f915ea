"""The sample files, written once, and a site on one of them with a clock that stands at the sample's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from dashboard import site
from dashboard.database import Snapshot
from dashboard.settings import DashboardSettings
from tests.dashboard import sample

FORMS: dict[str, Callable[[], sample.Sample]] = {
    "full": sample.build,
    "empty": sample.empty,
    "events_only": sample.events_only,
    "load_only": sample.load_only,
}


@pytest.fixture(scope="session")
def data_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A data folder for each form of the sample."""
    base = tmp_path_factory.mktemp("published")
    for name, form in FORMS.items():
        sample.write(form(), base / name)
    return {name: base / name for name in FORMS}


@pytest.fixture(scope="session")
def rows() -> sample.Sample:
    """The rows of the full sample."""
    return sample.build()


@pytest.fixture
def on(data_dirs: dict[str, Path]) -> Iterator[Callable[..., site.Site]]:
    """Installs a site on a form of the sample, or on a folder; the clock stands `late_s` after the end."""
    made: list[site.Site] = []

    def make(form: str | Path, late_s: float = 1.0) -> site.Site:
        folder = data_dirs[form] if isinstance(form, str) else form
        now: datetime = sample.END + timedelta(seconds=late_s)
        here = site.Site.of(DashboardSettings(data_dir=folder), lambda: now)
        made.append(here)
        site.install(here)
        return here

    yield make
    site.install(None)
    for here in made:
        here.database.close()


@pytest.fixture
def snapshot(on: Callable[..., site.Site]) -> Snapshot:
    return on("full").database.snapshot()
