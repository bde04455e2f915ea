"""What every page begins with: header, filters, and the data they select.

`begin` draws the header and filter bar and returns a `View`; where there is nothing to show it says what to do and stops the page. The
header's status is the only thing that polls: it looks at the file every `poll_s`, and runs the page again when the watermark moved and
the viewer did not pause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import streamlit as st

from dashboard import queries, site, units
from dashboard.components.style import STYLE
from dashboard.components.text import html_text
from dashboard.database import LackingError, Snapshot
from dashboard.filters import RANGES_S, Filters, Window
from dashboard.site import Site
from schemas.tables.read import PublishedError, PublishedMissingError

_ALL = {"pool": "All pools", "model": "All models", "route": "All routes", "worker": "All workers"}
SOURCES = (
    ("has_events", "KV events", "who holds which block, evictions and trust; comes from the bridge"),
    ("has_decisions", "router decisions", "why a worker was chosen, predicted overlap and lost prefixes; comes from the router"),
    ("has_outcomes", "outcomes", "requests, reported hits, TTFT and failures; comes from the router"),
    ("has_load", "worker load", "running, waiting, capacity and the engine's own counters; comes from the bridge's reading of /metrics"),
)


@dataclass(frozen=True)
class View:
    """One page's data: all of it from one snapshot."""

    site: Site
    snapshot: Snapshot
    filters: Filters
    window: Window

    def ask(self, name: str, window: Window | None = None, filters: Filters | None = None, **more: Any) -> list[dict[str, Any]]:
        return queries.ask(self.snapshot, name, filters or self.filters, window or self.window, **more)

    def sql(self, name: str, **more: Any) -> str:
        """The question as the SQL page would run it."""
        return queries.spelled_out(name, self.filters, self.window, **more)

    @property
    def revision(self) -> str:
        """Zoom is kept while the viewer looks at the same thing."""
        return repr(self.filters.to_url())

    @property
    def window_text(self) -> str:
        return units.window_text(self.window.length_s)


def begin(page: str) -> View:
    """Draws what is above each page. Does not return when there is nothing to show."""
    here = site.current()
    st.html(STYLE)
    filters = Filters.from_url(st.query_params.to_dict())
    try:
        snapshot = here.database.snapshot()
    except PublishedError as e:
        st.session_state["drawn"] = None
        _navigation(page, filters)
        _unavailable(e)
        st.stop()
    # Before the header, whose status compares with it.
    st.session_state["drawn"] = snapshot.watermark or snapshot.published.published_at
    _navigation(page, filters)
    window = filters.window(_end(snapshot.watermark))
    names: list[dict[str, Any]] = []
    # A file that lacks even these says so below; filters from the URL still stand.
    with contextlib.suppress(LackingError):
        names = queries.ask(snapshot, "names", filters, window)
        if not filters.fixed:
            window = window.from_data(queries.ask(snapshot, "data_start", filters, window)[0]["first_bucket"])
    if page != "sql":
        _filter_bar(filters, names)
    view = View(here, snapshot, filters, window)
    _notices(view)
    return view


def switch(page: str, filters: Filters) -> None:
    """Goes to another page, or this one, with other filters."""
    st.switch_page(st.session_state["pages"][page], query_params=filters.to_url())


def go_to_worker(view: View, click: Mapping[str, Any] | None) -> None:
    """A click on something that stands for a worker opens its page."""
    if click and isinstance(click.get("custom"), list) and len(click["custom"]) == 2:
        pool, worker = (str(part) if part is not None else None for part in click["custom"])
        switch("workers", one_worker(view, pool, worker))


def one_worker(view: View, pool: str | None, worker: str | None) -> Filters:
    """The viewer's filters and one worker; its pool too only where the name stands in several, so that the others stay in sight."""
    pools = {w["pool"] for w in view.ask("workers", filters=Filters(worker=worker))}
    return replace(view.filters, worker=worker, pool=pool if len(pools) > 1 else view.filters.pool)


def _navigation(page: str, filters: Filters) -> None:
    pages = st.session_state["pages"]
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="ww-header"):
        st.html('<a class="ww-brand" href="/" target="_self" aria-label="Warmwatch, start page"><i></i>Warmwatch</a>', width="content")
        with st.container(horizontal=True, gap="small", key="ww-nav", width="content"):
            for name, link in pages.items():
                st.page_link(link, label=f"**{link.title}**" if name == page else link.title, query_params=filters.to_url())
        with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center", gap="small", key="ww-status"):
            _status()
            st.toggle("Pause", key="paused", on_change=_pause, help="Keep what is on the screen; the data go on.")


def _pause() -> None:
    st.session_state["pinned"] = st.session_state.get("drawn") if st.session_state.get("paused") else None


def _end(watermark: datetime | None) -> datetime | None:
    """While paused the window ends where it ended then."""
    return st.session_state.get("pinned") or watermark


def _status() -> None:
    st.fragment(_poll, run_every=site.current().settings.poll_s)()


def _poll() -> None:
    here = site.current()
    now = here.now()
    try:
        snapshot = here.database.snapshot()
    except PublishedError as e:
        state = "no file" if isinstance(e, PublishedMissingError) else "file unreadable"
        st.html(f'<span class="ww-live bad"><i></i>{state}</span>', width="content")
        if st.session_state.get("drawn") is not None:
            st.rerun()
        return
    published = snapshot.published
    age_s = published.age_s(now)
    stale = age_s is None or age_s > here.settings.stale_after_s
    paused = bool(st.session_state.get("paused"))
    word = "stopped" if published.state == "stopped" else "stale" if stale else "ingest paused" if published.state == "paused" else "live"
    tone = "warn" if word != "live" else "calm" if paused else "good"
    behind = None if published.watermark is None else max(0.0, (now - published.watermark).total_seconds())
    text = f"{'paused' if paused else word} · " + ("no data yet" if behind is None else f"data {units.age(behind)} old")
    written = f"File written {units.clock(published.published_at)}; data up to {units.clock(published.watermark)}"
    st.html(
        f'<span class="ww-live {tone}" title="{html_text(written)}">'
        f"<i></i>{html_text(text)} <b>{'' if published.watermark is None else units.clock(published.watermark)}</b></span>",
        width="content",
    )
    drawn = st.session_state.get("drawn")
    if not paused and drawn != (snapshot.watermark or published.published_at):
        st.rerun()


def _filter_bar(filters: Filters, names: list[dict[str, Any]]) -> None:
    """The widgets follow the URL, and write to it when touched."""
    state = st.session_state
    state["f_range"] = None if filters.fixed else filters.range
    for kind in _ALL:
        state[f"f_{kind}"] = getattr(filters, kind)
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="ww-filters"):
        st.segmented_control("Time range", list(RANGES_S), key="f_range", label_visibility="collapsed", on_change=_filters_touched)
        with st.popover(_fixed_text(filters), type="secondary"):
            st.caption("A fixed range, in UTC")
            since = st.text_input(
                "From", value=f"{filters.since:%Y-%m-%d %H:%M:%S}" if filters.since else "", placeholder="2026-11-29 13:00:00"
            )
            until = st.text_input(
                "To", value=f"{filters.until:%Y-%m-%d %H:%M:%S}" if filters.until else "", placeholder="2026-11-29 14:00:00"
            )
            if st.button("Apply", disabled=not (since and until)):
                fixed = Filters.from_url({**filters.to_url(), "from": since, "to": until})
                if fixed.fixed:
                    st.query_params.from_dict(fixed.to_url())
                    st.rerun()
                st.error("Write both as YYYY-MM-DD HH:MM:SS, the first before the second.")
        for kind, everything in _ALL.items():
            chosen = getattr(filters, kind)
            options = [n["name"] for n in names if n["kind"] == kind]
            if chosen is not None and chosen not in options:
                options.append(chosen)
            if len(options) < 2 and chosen is None:
                continue
            st.selectbox(
                kind.capitalize(),
                options,
                index=None,
                key=f"f_{kind}",
                placeholder=everything,
                label_visibility="collapsed",
                width=190,
                on_change=_filters_touched,
            )
        if filters != Filters():
            st.button("Clear", type="tertiary", on_click=lambda: st.query_params.clear())


def _fixed_text(filters: Filters) -> str:
    if filters.since is None or filters.until is None:
        return "Fixed range"
    same_day = filters.since.date() == filters.until.date()
    return f"{filters.since:%Y-%m-%d %H:%M} – {filters.until:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}} UTC"


def _filters_touched() -> None:
    state = st.session_state
    before = Filters.from_url(st.query_params.to_dict())
    names = {kind: state.get(f"f_{kind}", getattr(before, kind)) for kind in _ALL}
    after = replace(before, **names)
    if state.get("f_range"):
        after = replace(after, range=state["f_range"], since=None, until=None)
    st.query_params.from_dict(after.to_url())


def _unavailable(error: PublishedError) -> None:
    title = "No published database yet" if isinstance(error, PublishedMissingError) else "The published database cannot be used"
    with st.container(border=True, key="ww-unavailable"):
        st.subheader(title, anchor=False)
        st.text(str(error))
        st.caption("This page looks again by itself. To see the whole system with mock workers: `make demo`.")


def _notices(view: View) -> None:
    published, settings = view.snapshot.published, view.site.settings
    age_s = published.age_s(view.site.now())
    if published.state == "stopped":
        st.warning(
            f"The collector was stopped at {units.clock(published.published_at)}; figures end there. Start it again: warmwatch collect"
        )
    elif age_s is None or age_s > settings.stale_after_s:
        old = "of unknown age" if age_s is None else f"{units.age(age_s)} old"
        st.warning(
            f"The published file is {old}: the collector seems to be down or cannot write to {settings.data_dir}. "
            f"Figures end at {units.clock(published.watermark)}. Start it: warmwatch collect"
        )
    if published.state == "paused":
        st.warning("The collector has paused ingest; the page Data health says why.")
    if view.snapshot.lacking:
        names = view.snapshot.lacking
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        st.warning(f"The file was written by an older collector and lacks {', '.join(names[:4])}{more}. Update the collector to see all.")
    if published.watermark is None:
        st.info(
            "The collector runs, and nothing has come yet. Start a bridge beside each worker (warmwatch bridge), send traffic through the "
            "router (warmwatch route), or see everything with mock workers: make demo."
        )
