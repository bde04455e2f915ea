"""What the pages share in one process: settings, database, clock. Streamlit runs the entry script anew for each viewer and passes it no
arguments, so this one value is kept in a module: `run` installs it, tests install theirs, and an entry script started by
`streamlit run` builds it from the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from dashboard.database import Database
from dashboard.settings import DashboardSettings
from schemas.settings import load
from schemas.tables.read import FILE_NAME


def utc_now() -> datetime:
    """Now in UTC, without tzinfo, as the tables have it."""
    return datetime.now(UTC).replace(tzinfo=None)


@dataclass(frozen=True, slots=True)
class Site:
    settings: DashboardSettings
    database: Database
    now: Callable[[], datetime] = utc_now

    @classmethod
    def of(cls, settings: DashboardSettings, now: Callable[[], datetime] = utc_now) -> Site:
        return cls(settings, Database(settings.data_dir / FILE_NAME), now)


_installed: Site | None = None


def install(site: Site | None) -> None:
    """What `current` returns from now on; None forgets it."""
    global _installed
    _installed = site


def current() -> Site:
    if _installed is None:
        install(Site.of(load(DashboardSettings, [])))
    assert _installed is not None
    return _installed
