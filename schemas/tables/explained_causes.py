"""The part of a request's page that says why its tokens were computed: the prompt from its first token on, as runs of one cause each.

Pure, from a row of `requests`. A cause that this version does not know is shown by its name.
"""

from __future__ import annotations

from typing import Any

from schemas.causes import ACTOR, MEANING, Cause
from schemas.tables.terminal import printable
from schemas.tables.words import count, fitted, indented, seconds

RUNS_SHOWN = 40
_STRIP = 60
_LETTERS = {
    Cause.HIT: "█", Cause.GRANULARITY: "g", Cause.TOO_SHORT: "s", Cause.NAMESPACE: "n", Cause.FIRST_SEEN: "·", Cause.DIVERGED: "d",
    Cause.IN_FLIGHT: "f", Cause.STALE_VIEW: "v", Cause.MISROUTED: "m", Cause.LOAD_BYPASS: "b", Cause.CLEARED: "c", Cause.EVICTED: "e",
    Cause.EVICTED_ELSEWHERE: "w", Cause.UNEXPLAINED: "?",
}  # fmt: skip
_BY_LABEL = {c.label: c for c in Cause}


def causes(r: dict[str, Any]) -> list[str]:
    """Lines of the section; none where nothing was attributed."""
    runs = [(run["cause"], run["tokens"]) for run in r.get("causes") or []]
    total = sum(n for _, n in runs)
    if not total:
        return []
    lines = ["Why its tokens were computed", f"  {_strip(runs, total)}", *indented(_table(runs, total))]
    if len(runs) > RUNS_SHOWN:
        lines.append(f"  and {count(len(runs) - RUNS_SHOWN)} further runs: warmwatch sql \"FROM why('REQUEST_ID')\"")
    return [*lines, *(f"  {sentence}" for sentence in _sentences(r))]


def _strip(runs: list[tuple[str, int]], total: int) -> str:
    """The prompt in `_STRIP` characters, each that of the cause with most tokens in its part."""
    out, at, run = [], 0.0, 0
    left = [float(n) for _, n in runs]
    for i in range(_STRIP):
        until = total * (i + 1) / _STRIP
        parts: dict[str, float] = {}
        while run < len(runs) and until - at > 1e-9:
            taken = min(left[run], until - at)
            parts[runs[run][0]] = parts.get(runs[run][0], 0.0) + taken
            left[run] -= taken
            at += taken
            if left[run] <= 1e-9:
                run += 1
        best = max(parts, key=lambda label: parts[label]) if parts else ""
        out.append(_LETTERS.get(_BY_LABEL.get(best, Cause.UNEXPLAINED), "?"))
    return "".join(out)


def _table(runs: list[tuple[str, int]], total: int) -> list[str]:
    rows, at = [], 0
    for label, tokens in runs[:RUNS_SHOWN]:
        cause = _BY_LABEL.get(label)
        letter = "?" if cause is None else _LETTERS[cause]
        meaning = "a cause that this version does not know" if cause is None else MEANING[cause]
        actor = ACTOR.get(cause, "") if cause is not None else ""
        rows.append([letter, count(at), count(tokens), f"{tokens / total:.1%}", printable(label), actor, meaning])
        at += tokens
    heads, lines = fitted(["", "from token", "tokens", "share", "cause", "who can act", "what it means"], rows, {0, 4, 5, 6})
    return [*heads, *lines]


def _sentences(r: dict[str, Any]) -> list[str]:
    out = []
    if r.get("ideal_tokens") is not None and r.get("held_tokens") is not None:
        holder = f" ({printable(r['held_worker'])})" if r.get("held_worker") is not None else ""
        prompt, ideal, held, selected, hit = (count(r.get(f"{step}_tokens")) for step in ("prompt", "ideal", "held", "selected", "hit"))
        out.append(
            f"Of {prompt} prompt tokens {ideal} had been computed before by any worker; at the dispatch one worker held {held}{holder}, "
            f"the chosen one {selected}; {hit} were found."
        )
    if r.get("diverged_at_token") is not None:
        out.append(f"It shares {count(r['diverged_at_token'])} tokens with earlier prompts before the first that differs.")
    if r.get("lost_s") is not None:
        act = f", of which somebody can act on {seconds(r['avoidable_s'])}" if r.get("avoidable_s") is not None else ""
        out.append(f"What was computed cost {seconds(r['lost_s'])} of prefill by the cost model{act}.")
    if r.get("regret_tokens"):
        out.append(f"Another worker held {count(r['regret_tokens'])} of the computed tokens at the dispatch{_regret(r.get('regret_s'))}.")
    if r.get("unexplained_reason") is not None:
        out.append(f"Unexplained: {printable(r['unexplained_reason'])}.")
    if r.get("loss_trust") not in (None, "exact"):
        out.append(f"Told from events that were {printable(r['loss_trust'])}: causes may be wrong.")
    if r.get("hit_tokens") is None:
        out.append("What was found in the cache is neither reported nor told from events: some of these tokens may have been hits.")
    return out


def _regret(regret_s: float | None) -> str:
    if regret_s is None:
        return ""
    if regret_s > 0:
        return f", and would have been {seconds(regret_s)} cheaper"
    return f"; going here bought {seconds(-regret_s)}"
