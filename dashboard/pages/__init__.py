"""The pages, by the name in their address, in the order of the header."""

from collections.abc import Callable

from dashboard.pages.health import health
from dashboard.pages.now import now
from dashboard.pages.sql import sql
from dashboard.pages.workers import workers

PAGES: dict[str, tuple[str, Callable[[], None]]] = {
    "now": ("Now", now),
    "workers": ("Workers", workers),
    "health": ("Data health", health),
    "sql": ("SQL", sql),
}
