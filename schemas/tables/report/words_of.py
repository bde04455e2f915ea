"""Facts into a page: which figures stand where, in which words, and what is said where nothing is known.

Every figure has its numerator, its denominator, the number of requests or windows behind it, and its time beside it. Not known and not
reported are said so; a share of nothing is not 0 %. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from schemas.tables.published import latency_middle_s
from schemas.tables.report.facts import Answer, Facts, Row
from schemas.tables.report.sections import Cell, Grid, Page, Section
from schemas.tables.words import JOINED, UNKNOWN, age, count, seconds

TAIL_REQUESTS = 300
"""Requests below which a 99th percentile is not told."""
TRUST_ROWS = 20
"""As many as its question gives at most."""
LOUD = 0.05
"""Share of tokens without a told cause from which the page warns at its top."""
_STALE = timedelta(seconds=60)
_WINDOW_S = 300
_NO_DATA = "No data yet"
_NOT_KNOWN = "not known"


def page_of(facts: Facts) -> Page:
    sections = [_short(facts), _sources(facts), _workers(facts), _ladder(facts), _causes(facts), _routes(facts), _hotspots(facts)]
    sections += [_divergence(facts), _reuse(facts), _pressure(facts), _changes(facts), _health(facts)]
    of_pool = "" if facts.pool is None else f", pool {facts.pool}"
    about = [f"{_span(facts)} UTC ({_length(facts)}){of_pool}. Written {_time(facts.now)} UTC.", *_about(facts)]
    return Page("Warmwatch report", about, sections)


def _about(facts: Facts) -> list[str]:
    file, covered = _first(facts.file), _first(facts.covered)
    out = []
    if file.get("published_at") is not None:
        state = file.get("state")
        out.append(
            f"From a file published {age(facts.now - file['published_at'])} before that by a collector that "
            + f"is {state or 'in an unknown state'}."
            + (" It has not been renewed since." if state == "running" and facts.now - file["published_at"] >= _STALE else "")
        )
    if covered.get("first_at") is None:
        out.append("No counts of any worker lie in this time.")
    elif covered["first_at"] - facts.since > timedelta(seconds=20) or facts.until - covered["last_at"] > timedelta(seconds=20):
        out.append(f"Counts there are from {_time(covered['first_at'])} to {_time(covered['last_at'])} only.")
    return out


def _short(facts: Facts) -> Section:
    """The few sentences that somebody reads who reads no more."""
    loss = facts.loss or []
    total = sum(r["tokens"] for r in loss)
    lines: list[str] = []
    if total:
        hit = sum(r["tokens"] for r in loss if r["cause"] == "hit")
        lines.append(f"Of {_big(total)} attributed prompt tokens, {_big(hit)} ({_share(hit, total)}) were found in a cache.")
        avoidable = [r for r in loss if r["avoidable"]]
        tokens = sum(r["tokens"] for r in avoidable)
        lines.append(
            f"{_big(tokens)} ({_share(tokens, total)}) were computed for causes that somebody can act on{_cost_of(avoidable)}."
            if tokens
            else "None were computed for causes that somebody can act on."
        )
        if tokens:
            top = max(avoidable, key=lambda r: (r["tokens"], r["cause"]))
            lines.append(
                f"The largest of these is {top['cause']}: {_big(top['tokens'])} tokens ({_share(top['tokens'], total)}), {top['meaning']}. "
                f"Who can act: {top['who_can_act']}."
            )
    else:
        whole = next((r for r in facts.workers or [] if r["total"]), {})
        if whole.get("reported_prompt_tokens"):
            lines.append(
                f"{_share(whole['cached_tokens'], whole['reported_prompt_tokens'])} of {_big(whole['reported_prompt_tokens'])} reported "
                "prompt tokens were found in a cache. Why the others were computed is not told: no request was attributed."
            )
        elif whole.get("engine_query_tokens"):
            lines.append(
                f"By the engines' own counters {_share(whole['engine_hit_tokens'], whole['engine_query_tokens'])} of "
                f"{_big(whole['engine_query_tokens'])} looked-up tokens were found in a cache. Why the others were computed is not told."
            )
        else:
            lines.append(f"{_NO_DATA}: no request of this time was attributed, and no engine reported hits.")
    if facts.hotspots:
        spot = facts.hotspots[0]
        lines.append(
            f"The prefix that was computed again most: {_prefix(spot)}{_of_kind(spot)}, at least {_big(spot['lost_tokens'])} tokens in "
            f"{_many(spot['requests'], 'request')}, most of them {spot['top_cause'] or 'for a cause that is not known'}."
        )
    lines += [_parts_at(facts, r) for r in (facts.divergence or [])[:1]]
    lines += _twice(facts)
    pressed = [r for r in facts.pressure or [] if r["worker"] is None and (r["worst"] or 0) > 1]
    lines += [
        f"Pool {r['pool']}: the newest prompts of all sessions with a request in a window came to {r['worst']:.2f} times what its caches "
        f"hold (worst of {_windows(r['told'])}, {_time(r['worst_at'])}). Sessions that ended in it count, too; if all went on, no policy "
        "could keep them all."
        for r in pressed
    ]
    if facts.changes:
        newest = facts.changes[0]
        lines.append(
            f"{_many(newest['found'], 'change')} meanwhile, the newest at {_time(newest['happened_at'])}: {newest['kind'] or UNKNOWN}, "
            f"{_where(newest)}."
        )
    untold = sum(r["tokens"] for r in loss if r["cause"] == "unexplained")
    notes = []
    if total and untold / total >= LOUD:
        notes.append(f"{_share(untold, total)} of the tokens have no told cause; see Data health before trusting the shares.")
    if broken := [r for r in facts.trust or [] if r["trust"] != "exact"]:
        more = " at least" if len(broken) == TRUST_ROWS else ""
        notes.append(f"KV events of{more} {_many(len(broken), 'worker')} are not complete now; see Data health.")
    return Section("In short", lines, notes=notes)


def _sources(facts: Facts) -> Section:
    file = _first(facts.file)
    told = {
        "has_events": "KV events (what each cache holds)",
        "has_decisions": "router decisions (where requests went, and why)",
        "has_outcomes": "outcomes (what engines reported)",
        "has_load": "worker load (engines' own counters)",
    }
    have = [words for name, words in told.items() if file.get(name)]
    lack = [words for name, words in told.items() if file.get(name) is False]
    lines = [f"Received: {', '.join(have)}."] if have else ["Nothing was received yet."]
    if lack:
        lines.append(f"Never received: {', '.join(lack)}.")
    notes = []
    if file.get("has_events") is False:
        notes.append("Without KV events causes, hotspots by loss, the loss ladder and duplication cannot be told.")
    if file.get("has_decisions") is False:
        notes.append("Without decisions no prompt is known by its blocks: causes, hotspots and reuse curves cannot be told.")
    return Section("What this is made from", lines, notes=notes)


def _workers(facts: Facts) -> Section:
    rows = facts.workers
    if not rows:
        return _nothing("Hit rate and time to first token", rows)
    ttft = {(r["pool"], r["worker"], r["total"]): r for r in facts.ttft or []}
    grid = []
    for r in rows:
        t = ttft.get((r["pool"], r["worker"], r["total"]), {})
        told, of, source, n = _best_hits(r)
        share = told / of if told is not None and of else None
        grid.append(
            [
                Cell("all" if r["total"] else r["worker"] or UNKNOWN),
                Cell("" if r["total"] else r["pool"] or UNKNOWN),
                Cell(count(r["requests"])),
                Cell(count(r["failed"])),
                Cell("not reported" if share is None else f"{share:.1%}", share),
                Cell("" if share is None else f"{count(round(told or 0))} of {count(round(of or 0))}"),
                Cell(source if n is None else f"{source}, {count(n)}"),
                *(Cell(text) for text in _percentiles(t)),
                Cell(count(t.get("requests"))),
            ]
        )
    head = [
        "worker",
        "pool",
        "requests",
        "failed",
        "hit rate",
        "tokens found of prompt",
        "told by, requests",
        "TTFT p50",
        "p90",
        "p99",
        "n",
    ]
    caption = f"{_span(facts)}: prompt tokens found in the cache of those that a source tells of; TTFT of streams, within 1 %"
    notes = [f"No p99 below {TAIL_REQUESTS} requests."]
    if not facts.ttft:
        notes.append("No time to first token was recorded.")
    whole = rows[0]
    if whole["event_mismatches"]:
        notes.append(
            f"For {count(whole['event_mismatches'])} of {count(whole['event_requests'])} requests the engine's report and the KV events "
            "disagree."
        )
    if whole["failed"]:
        notes.append(f"{count(whole['failed'])} of {count(whole['requests'])} requests failed or were refused.")
    return Section("Hit rate and time to first token", grids=[Grid(head, grid, frozenset({0, 1, 6}), caption)], notes=notes)


def _best_hits(r: Row) -> tuple[float | None, float | None, str, int | None]:
    """Found, of, who says so, requests: the engine's reports, else events, else its counters."""
    if r["reported_prompt_tokens"]:
        return r["cached_tokens"], r["reported_prompt_tokens"], "reports", r["reported_requests"]
    if r["event_prompt_tokens"]:
        return r["event_hit_tokens"], r["event_prompt_tokens"], "KV events", r["event_requests"]
    if r["engine_query_tokens"]:
        return r["engine_hit_tokens"], r["engine_query_tokens"], "engine counters", None
    return None, None, "nobody", None


def _percentiles(t: Row) -> list[str]:
    out = []
    for name in ("p50", "p90", "p99"):
        bucket = t.get(f"{name}_bucket")
        few = name == "p99" and (t.get("requests") or 0) < TAIL_REQUESTS
        out.append(UNKNOWN if bucket is None else "too few" if few else seconds(latency_middle_s(bucket)))
    return out


def _ladder(facts: Facts) -> Section:
    rows = [r for r in facts.ladder or [] if r["tokens"] is not None]
    if not rows:
        return _nothing("The loss ladder", facts.ladder and [])
    grid = [
        [Cell(r["step"]), Cell(count(r["tokens"])), Cell(_percent(r["share"]), r["share"]), Cell(_lost(r["lost_here"])), Cell(r["meaning"])]
        for r in rows
    ]
    caption = f"{_span(facts)}: prompt tokens of {count(rows[0]['requests'])} requests whose events were complete"
    lines = []
    trades = _first(facts.trades)
    if trades.get("regret_tokens") is not None:
        text = f"Tokens computed that another worker held: {count(trades['regret_tokens'])}."
        if trades.get("misrouted_s") is not None:
            text += f" By the router's cost model misrouting lost {seconds(trades['misrouted_s'])}"
            bought = trades.get("bypass_bought_s")
            text += f", and load bypasses bought {seconds(bought)}." if bought is not None else "."
        lines.append(text)
    return Section(
        "The loss ladder", lines, [Grid(["step", "tokens", "of prompts", "lost here", "what it is"], grid, frozenset({0, 4}), caption)]
    )


def _causes(facts: Facts) -> Section:
    loss = facts.loss
    if not loss:
        return _nothing("Why tokens were computed", loss)
    total = sum(r["tokens"] for r in loss)
    grid = [
        [
            Cell(r["cause"]), Cell(count(r["tokens"])), Cell(_percent(r["share"]), r["share"]), Cell(count(r["requests"])),
            Cell("" if r["cause"] == "hit" else _known_s(r)), Cell("" if r["cause"] == "hit" else _gpu(r["gpu_s"])),
            Cell("" if r["cause"] == "hit" else _money(r)), Cell(r["who_can_act"] or ""),
        ]
        for r in loss
    ]  # fmt: skip
    head = ["cause", "tokens", "of all", "requests", "prefill", "GPUs", "cost", "who can act"]
    caption = f"{_span(facts)}: all {count(total)} prompt tokens of attributed requests; hit and causes add up to them"
    actors: dict[str, list[Row]] = {}
    for r in loss:
        if r["cause"] != "hit":
            actors.setdefault(r["who_can_act"] or UNKNOWN, []).append(r)
    sums = sorted(((sum(r["tokens"] for r in group), who, group) for who, group in actors.items()), key=lambda s: (-s[0], s[1]))
    by_actor = [
        [Cell(who), Cell(count(n)), Cell(_share(n, total), n / total if total else None), Cell("; ".join(map(_meant, group)))]
        for n, who, group in sums
    ]
    grids = [
        _told(head, grid, frozenset({0, 7}), caption),
        Grid(
            ["who can act", "tokens", "of all", "on what, and what that is"],
            by_actor,
            frozenset({0, 3}),
            f"{_span(facts)}: the same tokens by who can act on them",
        ),
    ]
    lost = sum(r["tokens"] for r in loss if r["cause"] != "hit")
    priced = sum(r["seconds_known_tokens"] or 0 for r in loss if r["cause"] != "hit")
    notes = [
        f"A request with several causes counts at each. Prefill seconds are known for {count(priced)} of {count(lost)} computed tokens."
    ]
    models = facts.cost_models or []
    if not models:
        notes.append("There is no cost model yet: seconds and money are not known.")
    elif all(m["price_per_gpu_hour"] is None for m in models):
        notes.append("No price is configured: what it cost in money is not known.")
    if any(m["gpus"] is None for m in models):
        notes.append("The number of GPUs of some workers is not configured: their GPU-seconds are not known.")
    fits = [
        f"{m['pool']}/{m['model']} on {m['hardware']}: {m['source'] or 'nothing fitted'}, {count(m['observations'])} prefills"
        + (f", typically off by {seconds(m['residual_s'])}" if m["residual_s"] is not None else "")
        for m in models[:6]
    ]
    if fits:
        notes.append(f"Seconds come from these cost models: {'; '.join(fits)}{'; and others' if len(models) > 6 else ''}.")
    return Section("Why tokens were computed", _of_ttft(facts), grids, notes)


def _of_ttft(facts: Facts) -> list[str]:
    return [
        f"Pool {r['pool'] or UNKNOWN}: by the cost model {_percent(r['lost_share'])} of the time to first token was prefill of what was no "
        f"hit, {_percent(r['avoidable_share'])} of what somebody can act on ({_many(r['requests'], 'request')} whose times are known)."
        for r in facts.ttft_loss or []
    ]


def _meant(r: Row) -> str:
    return f"{r['cause']}: {r['meaning'] or UNKNOWN}"


def _routes(facts: Facts) -> Section:
    if not facts.routes:
        return _nothing("By route", facts.routes)
    grid = [
        [
            Cell(r["route"] or "no route named"), Cell(r["pool"] or UNKNOWN), Cell(count(r["tokens"])),
            Cell(_share(r["hit_tokens"], r["tokens"]), _part(r["hit_tokens"], r["tokens"])), Cell(count(r["avoidable_tokens"])),
            Cell(_share(r["avoidable_tokens"], r["tokens"]), _part(r["avoidable_tokens"], r["tokens"])),
            Cell(UNKNOWN if r["avoidable_s"] is None else seconds(r["avoidable_s"])), Cell(_gpu(r["gpu_s"])), Cell(_money(r)),
            Cell(r["top_cause"] or "none"),
        ]
        for r in facts.routes
    ]  # fmt: skip
    head = ["route", "pool", "prompt tokens", "hit", "avoidable", "of its tokens", "prefill", "GPUs", "cost", "most for"]
    caption = f"{_span(facts)}: prompt tokens of attributed requests; avoidable: of causes that somebody can act on"
    return Section("By route", grids=[_told(head, grid, frozenset({0, 1, 9}), caption)])


def _hotspots(facts: Facts) -> Section:
    if not facts.hotspots:
        return _nothing("Hotspots: prefixes computed again", facts.hotspots)
    grid, held, first = [], [], facts.hotspots[0]
    for r in facts.hotspots:
        labels = [r["route"], r["template"], r["tenant"]]
        grid.append(
            [
                Cell(_named(r)), Cell(" / ".join(x or UNKNOWN for x in labels)),
                Cell(count(r["lost_tokens"]), _part(r["lost_tokens"], first["lost_tokens"])),
                Cell(f"+{count(r['error_tokens'])}" if r["error_tokens"] else "exact"), Cell(count(r["requests"])),
                Cell(_share(r["avoidable_tokens"], r["lost_tokens"])), Cell(r["top_cause"] or UNKNOWN),
                Cell(_known_s(r)), Cell(_money(r)),
            ]
        )  # fmt: skip
        held.append(
            [Cell(_named(r)), Cell(count(r["workers"])), Cell(count(r["copies"])), Cell(_after(r["idle_p50_s"])),
             Cell(_after(r["gone_p50_s"])), Cell(r["example_request_id"] or UNKNOWN)]
        )  # fmt: skip
    head = ["prefix", "route / template / tenant", "tokens, at least", "at most", "requests", "avoidable", "most for", "prefill", "cost"]
    lost = sum(r["tokens"] for r in facts.loss or [] if r["cause"] != "hit")
    computed = f" (computed in this time in all: {count(lost)})" if lost else ""
    caption = (
        f"{_span(facts)}, windows of 300 s that touch it: the {count(len(facts.hotspots))} largest of {count(first['found'])} prefixes; "
        f"all together {count(first['found_tokens'])} tokens{computed}; each counts at one"
    )
    notes = [
        "first_seen and granularity are left out. workers: that computed it; copies: that held it at the end of the newest "
        "window; idle: median time unused before eviction; gone: median time from the loss to the next need.",
        "none in common: prompts of one kind that share no heavy prefix: they differ from their beginning on.",
        "How one of them came about: warmwatch explain EXAMPLE.",
    ]
    snippets = [f"{_prefix(r)} begins: {r['snippet']}" for r in facts.hotspots if r["snippet"]]
    where = Grid(["prefix", "workers", "copies", "idle", "gone", "example"], held, frozenset({0, 5}), "The same prefixes in the caches")
    return Section("Hotspots: prefixes computed again", snippets, [_told(head, grid, frozenset({0, 1, 6}), caption), where], notes)


def _divergence(facts: Facts) -> Section:
    if not facts.divergence:
        return _nothing("Where prompts stop being alike", facts.divergence)
    lines = [_parts_at(facts, r) for r in facts.divergence]
    note = f"{_span(facts)}, windows of 300 s that touch it. Shares are of all prompt tokens of the kind, not of what was missed."
    return Section("Where prompts stop being alike", lines, notes=[note])


def _parts_at(facts: Facts, r: Row) -> str:
    cost = "" if r["lost_s"] is None else f", {seconds(r['lost_s'])} of prefill"
    example = f", such as {r['example_request_id']}" if r["example_request_id"] else ""
    share = _share(r["diverged_tokens"], r["all_prompt_tokens"])
    return (
        f"Prompts of {_kind(r)} differ{_depth(r)}: {count(r['requests'])} of {count(r['all_requests'])} requests computed "
        f"{_big(r['diverged_tokens'])} tokens again that were known after another beginning{_an_hour(facts, r)} ({share} of "
        f"{_big(r['all_prompt_tokens'])} prompt tokens, {_percent(r['depth_share'])} of them there{cost}){example}."
    )


def _an_hour(facts: Facts, r: Row) -> str:
    """Of the time of which there are counts; empty where that is less than a window."""
    covered = _first(facts.covered)
    if covered.get("first_at") is None or (covered["last_at"] - covered["first_at"]).total_seconds() < _WINDOW_S:
        return ""
    return f", {_big(r['diverged_tokens'] * 3600 / (covered['last_at'] - covered['first_at']).total_seconds())} an hour"


def _depth(r: Row) -> str:
    lo, hi = r["depth_from"], r["depth_to"]
    if lo is None or hi is None:
        return " at a depth that is not known"
    many = " at many depths, most often" if r["depth_share"] is not None and r["depth_share"] < 0.5 else ""
    return f"{many} at token {count(lo)}" if hi - lo == 1 else f"{many} between tokens {count(lo)} and {count(hi - 1)}"


def _reuse(facts: Facts) -> Section:
    if not facts.reuse:
        return _nothing("What caches of another size would bring", facts.reuse)
    grids = []
    for pool in sorted({r["pool"] or "" for r in facts.reuse}):
        for whole in (True, False):
            rows = [r for r in facts.reuse if (r["pool"] or "") == pool and r["whole"] == whole and r["kind"] == "capacity"]
            grids += _curve(
                facts, pool, rows, "the pool as one cache" if whole else "each worker with its own cache, for today's routing only"
            )
        ttl = [r for r in facts.reuse if (r["pool"] or "") == pool and r["whole"] and r["kind"] == "ttl"]
        if ttl:
            body = [[Cell(_after(r["ttl_s"])), *_rate(r), Cell(_method(r))] for r in ttl]
            head = ["forgotten after", "hit rate", "tokens found of prompt", "method"]
            grids.append(
                Grid(head, body, frozenset({3}), f"{_span(facts)}, pool {pool}: if blocks were forgotten so long after their last use")
            )
    return Section("What caches of another size would bring", _twice(facts), grids)


def _curve(facts: Facts, pool: str, rows: Sequence[Row], whose: str) -> list[Grid]:
    if not rows:
        return []
    grid = []
    for r in rows:
        gain = _gain(r, rows)
        points = UNKNOWN if gain is None else f"{gain:+.1f}{JOINED}points"
        size = f"{r['scale']:g} x" + (f" {r['tier']}" if r["tier"] else "")
        grid.append([Cell(size), *_rate(r), Cell(points), Cell(_method(r))])
    head = ["size", "hit rate", "tokens found of prompt", "against 1 x", "method"]
    caption = f"{_span(facts)}, {_windows(max(r['windows'] for r in rows))}, pool {pool}, {whose}: LRU of that many times today's blocks"
    return [Grid(head, grid, frozenset({0, 4}), caption)]


def _rate(r: Row) -> list[Cell]:
    part = _part(r["hit_tokens"], r["prompt_tokens"])
    return [Cell(_percent(part), part), Cell(f"{count(round(r['hit_tokens'] or 0))} of {count(r['prompt_tokens'])}")]


def _method(r: Row) -> str:
    if r["exact"]:
        return "exact"
    return f"{r['method'] or 'estimated'}, error up to {_percent(r['error'])}"


def _gain(r: Row, rows: Sequence[Row]) -> float | None:
    """Points of hit rate against today's size of the same tiers."""
    today = next((x for x in rows if x["scale"] == 1 and x["tier"] == r["tier"]), None)
    if today is None or not r["prompt_tokens"] or not today["prompt_tokens"]:
        return None
    return float(100 * (r["hit_tokens"] / r["prompt_tokens"] - today["hit_tokens"] / today["prompt_tokens"]))


def _twice(facts: Facts) -> list[str]:
    out = []
    for pool in sorted({r["pool"] or "" for r in facts.reuse or []}):
        for whole, whose in ((True, "as one cache"), (False, "each worker on its own")):
            rows = [r for r in facts.reuse or [] if (r["pool"] or "") == pool and r["whole"] == whole and r["kind"] == "capacity"]
            for r in [r for r in rows if r["scale"] == 2 and (r["tier"] or "GPU") == "GPU"][:1]:
                gain = _gain(r, rows)
                if gain is not None:
                    extra = gain / 100 * r["prompt_tokens"]
                    unsure = "" if r["exact"] else f", error up to {_percent(r['error'])}"
                    out.append(
                        f"Pool {pool}, {whose}: twice the cache would bring {gain:+.1f} points of hit rate ({_big(round(extra))} of "
                        f"{_big(r['prompt_tokens'])} prompt tokens{unsure})."
                    )
    return out


def _pressure(facts: Facts) -> Section:
    if not facts.pressure:
        return _nothing("How full the caches are", facts.pressure)
    grid = []
    for r in facts.pressure:
        worst = UNKNOWN if r["worst"] is None else f"{r['worst']:.2f}"
        newest = UNKNOWN if r["newest"] is None else f"{r['newest']:.2f}"
        grid.append(
            [
                Cell("all workers" if r["worker"] is None else r["worker"]), Cell(r["pool"] or UNKNOWN),
                Cell(worst, _part(r["worst"], 2)), Cell(newest),
                Cell(f"{count(r['over'])} of {count(r['told'])}"), Cell(f"{count(r['active_sessions'])} / {count(r['active_blocks'])}"),
                Cell(count(r["working_set_blocks"])), Cell(count(r["capacity_blocks"])),
                Cell(UNKNOWN if r["duplication"] is None else f"{r['duplication']:.2f}"), Cell(count(r["duplicate_tokens"])),
                Cell(" / ".join(_after(r[name]) for name in ("lifetime_p50_s", "idle_p50_s", "return_p50_s"))),
            ]
        )  # fmt: skip
    head = ["worker", "pool", "worst", "newest", "over 1", "sessions / blocks", "working set", "capacity", "copies a block",
            "tokens in copies", "life / idle / return"]  # fmt: skip
    caption = (
        f"{_span(facts)}, {_windows(max(r['windows'] for r in facts.pressure))}: blocks of active sessions' newest "
        "prompts, of the capacity (worst: bar to 2); working set, sessions and their blocks: the most of one window; the rest of the newest"
    )
    notes = ["A session is active in a window in which it has a request, also if it ended then: an upper bound of what is needed next."]
    if any(r["worst"] is None for r in facts.pressure):
        notes.append("Pressure is not known where the engine reports no capacity or no session is named.")
    notes.append("life: median from store to removal; idle: from last use to removal; return: from removal to being needed again.")
    return Section("How full the caches are", grids=[Grid(head, grid, frozenset({0, 1}), caption)], notes=notes)


def _changes(facts: Facts) -> Section:
    if not facts.changes:
        return Section("What changed meanwhile", [_absent(facts.changes, "Nothing was marked, and no restart, clear or gap was seen.")])
    grid = [
        [Cell(_time(r["happened_at"])), Cell(r["kind"] or UNKNOWN), Cell(_where(r)),
         Cell(r["text"] or ""), Cell(r["author"] or UNKNOWN)]
        for r in facts.changes
    ]  # fmt: skip
    found = facts.changes[0]["found"]
    caption = f"{_span(facts)}: the newest {count(len(grid))} of {count(found)}"
    return Section(
        "What changed meanwhile", grids=[Grid(["time (UTC)", "kind", "where", "what", "who"], grid, frozenset(range(5)), caption)]
    )


def _health(facts: Facts) -> Section:
    """What the figures above do not stand on."""
    notes: list[str] = []
    loss, requests = facts.loss or [], _first(facts.requests)
    total, untold = sum(r["tokens"] for r in loss), sum(r["tokens"] for r in loss if r["cause"] == "unexplained")
    lines = []
    if total:
        lines.append(f"Tokens without a told cause: {count(untold)} of {count(total)} ({_share(untold, total)}).")
        lines += [f"  {r['reason']}: {_many(r['tokens'], 'token')} of {_many(r['requests'], 'request')}" for r in facts.unexplained or []]
    n = requests.get("requests")
    if n:
        kinds = (
            ("decision_missing", "without a decision"), ("outcome_missing", "without an outcome"), ("in_flight", "in flight"),
            ("hit_unknown", "answered without a known hit"), ("untrusted", "told from events that were not complete"),
        )  # fmt: skip
        lines.append(f"Requests: {count(n)}, of which {', '.join(f'{count(requests[name])} {words}' for name, words in kinds)}.")
    elif facts.requests is not None:
        lines.append("There are no rows of single requests in this time.")
    for r in facts.trust or []:
        where = "/".join(str(x) for x in (r["pool"], r["worker"], r["rank"]) if x is not None)
        down = "; its metrics page does not answer" if r["up"] is False else ""
        why = f" ({r['trust_reason']})" if r["trust_reason"] else ""
        notes.append(f"Events of {where} are {r['trust'] or 'not known'} now{why}{down}.")
    notes += [
        f"{r['status']}: {' '.join(x for x in (r['area'], r['subject'], r['name']) if x)}: {r['detail'] or r['value']}"
        for r in facts.health or []
    ]
    notes += [f"Set aside: {_many(r['records'], 'record')} of {r['topic']}: {r['reason']}" for r in facts.dead_letters or []]
    lacking = facts.lacks()
    if lacking:
        notes.append(f"This file is of an earlier version and cannot answer: {', '.join(lacking)}.")
    return Section("Data health", lines or [f"{_NO_DATA}."], notes=notes)


# words and figures


def _told(head: Sequence[str], rows: Sequence[Sequence[Cell]], left: frozenset[int], caption: str) -> Grid:
    """Without the columns of GPUs and cost where no row knows them: the caption says so instead."""
    unknown = [i for i, name in enumerate(head) if name in ("GPUs", "cost") and all(r[i].text in ("", _NOT_KNOWN) for r in rows)]
    if not unknown:
        return Grid(head, rows, left, caption)
    keep = [i for i in range(len(head)) if i not in unknown]
    said = " and ".join(head[i] for i in unknown)
    return Grid(
        [head[i] for i in keep], [[r[i] for i in keep] for r in rows], frozenset(n for n, i in enumerate(keep) if i in left),
        f"{caption}; {said}: {_NOT_KNOWN}",
    )  # fmt: skip


def _nothing(title: str, answer: Answer) -> Section:
    return Section(title, [_absent(answer, f"{_NO_DATA}.")])


def _absent(answer: Answer, empty: str) -> str:
    return "Not in this file: it is of an earlier version." if answer is None else empty


def _first(answer: Answer) -> Row:
    return answer[0] if answer else {}


def _prefix(r: Row) -> str:
    if not r["prefix"]:
        return f"beginning of {_kind(r)}"
    return f"{count(r['depth_tokens'])} tokens ({r['prefix']:016x})"


def _named(r: Row) -> str:
    return _prefix(r) if r["prefix"] else "none in common"


def _of_kind(r: Row) -> str:
    """Of a prefix whose name does not say it."""
    return f" of {_kind(r)}" if r["prefix"] else ""


def _kind(r: Row) -> str:
    names = (("route", r["route"]), ("template", r["template"]), ("model", r["model"]))
    said = [f"{word} {value}" for word, value in names if value is not None]
    return ", ".join(said) if said else "no named kind"


def _cost_of(rows: Sequence[Row]) -> str:
    """', which took ...' of several causes; empty where nothing is known."""
    known = [r["lost_s"] for r in rows if r["lost_s"] is not None]
    if not known:
        return ""
    gpu = [r["gpu_s"] for r in rows if r["lost_s"] is not None]
    money = [r["money"] for r in rows if r["lost_s"] is not None]
    currencies = {r["currency"] for r in rows if r["money"] is not None}
    told, tokens = sum(r["seconds_known_tokens"] or 0 for r in rows), sum(r["tokens"] for r in rows)
    text = f", which took {seconds(sum(known))} of prefill" + (
        f" as far as known ({_share(told, tokens)} of them)" if told < tokens else ""
    )
    if all(x is not None for x in gpu):
        text += f" ({_gpu(sum(gpu))})"
    if all(x is not None for x in money) and len(currencies) == 1:
        text += f", {_amount(sum(money), currencies.pop())}"
    return text


def _known_s(r: Row) -> str:
    return _NOT_KNOWN if r["lost_s"] is None else seconds(r["lost_s"])


def _gpu(gpu_s: float | None) -> str:
    if gpu_s is None:
        return _NOT_KNOWN
    return f"{gpu_s / 3600:.2f}{JOINED}GPU{JOINED}h" if gpu_s >= 3600 else f"{gpu_s:.3g}{JOINED}GPU{JOINED}s"


def _money(r: Row) -> str:
    return _NOT_KNOWN if r["money"] is None else _amount(r["money"], r["currency"])


def _amount(money: float, currency: str | None) -> str:
    return f"{money:,.2f}".replace(",", JOINED) + (f"{JOINED}{currency}" if currency else "")


def _lost(tokens: int | None) -> str:
    return "" if tokens is None else count(tokens)


def _after(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else age(timedelta(seconds=value_s)) if value_s >= 1 else seconds(value_s)


def _part(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else float(numerator / denominator)


def _share(numerator: float | None, denominator: float | None) -> str:
    return _percent(_part(numerator, denominator))


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"


def _big(n: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(n) >= size:
            return f"{n / (1e3 if unit == 'k' else size):.3g}{JOINED}{unit}"
    return count(round(n))


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _windows(n: int) -> str:
    return _many(n, "window")


def _many(n: int, what: str) -> str:
    return f"{count(n)} {what}" if n == 1 else f"{count(n)} {what}s"


def _where(r: Row) -> str:
    return "/".join(x for x in (r["pool"], r["worker"]) if x) or "fleet"


def _span(facts: Facts) -> str:
    return " to ".join(f"{at:%Y-%m-%d %H:%M:%S}".removesuffix(":00") for at in (facts.since, facts.until))


def _length(facts: Facts) -> str:
    return age(facts.until - facts.since)
