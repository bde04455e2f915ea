"""All that is known of one request, as a page for people: what came, why it went where it went, what became of it, and what is not known.

Pure: facts in, text out. Facts are rows of the published tables as they are (`explain.py` reads them), so a column that an older file
lacks, or that a foreign router does not fill, is None and is said to be not known, never shown as 0. Names and errors come from outside:
what is not printable in them is escaped, since it goes to a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from schemas.tables.explained_causes import causes
from schemas.tables.terminal import printable
from schemas.tables.words import JOINED, UNKNOWN, age, aligned, count, fold, indented, seconds

Row = dict[str, Any]
"""A row of a published table by column."""

_SOURCES = {
    "exact": "counted by the router's own tokenizer",
    "engine": "counted by the engine's /tokenize",
    "text": "approximated from the characters of the prompt, so overlap is a guess from what this router sent before",
    "none": "not counted: its prefix was unknown, so only load decided",
}
_CUT = {
    "upstream": "the worker broke its answer off",
    "timeout": "the worker fell silent within its answer",
    "shutdown": "the router's end cut it off",
}
_TRUST = {
    "degraded": "its events were not complete or not fresh, so what it held counted less",
    "blind": "nothing certain was known of its cache, so what it held counted nothing",
}
_TERMS = (("queue_s", "waiting"), ("prefill_s", "prefill"), ("load_s", "loading"), ("decode_s", "decoding beside it"))
_SMALL_S = 0.00005
SAME_ID_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one request. candidates, shadows: of its last decision. changes: what happened to its worker before, the newest first."""

    request: Row
    candidates: Sequence[Row] = ()
    shadows: Sequence[Row] = ()
    attempts: Sequence[Row] = ()
    earlier_decisions: int = 0
    changes: Sequence[Row] = ()
    same_id: Sequence[str] = field(default=())
    """Other requests that came with the same id from the client, the newest first; some of them."""
    lacks: Sequence[str] = ()
    """Tables that the published file does not have, being older."""


def page(facts: Facts, now: datetime) -> str:
    """The whole page, without a final newline. now: naive UTC."""
    parts = [_came(facts, now)]
    if facts.request.get("decision_missing"):
        parts.append(["Decision", "  No decision of this request was received in time: why it went there is not known."])
    elif facts.request.get("policy") is None:
        parts.append(["Decision", "  None: no worker could be chosen (see the outcome)."])
    else:
        parts += [_decided(facts), _shadows(facts), _attempts(facts)]
    parts += [_outcome(facts, now), causes(facts.request), _not_known(facts)]
    return "\n\n".join("\n".join(fold(lines)) for lines in parts if lines).replace(JOINED, " ")


def _came(facts: Facts, now: datetime) -> list[str]:
    r = facts.request
    at = r.get("started_at") or r.get("ended_at")
    when = "at an unknown time" if at is None else f"{_time(at)} UTC, {age(now - at)} ago"
    lines = [f"Request {printable(r['request_id'])}", f"  {when}"]
    what = [
        _named("router", r.get("router")),
        _named("pool", r.get("pool")),
        _named("model", r.get("model")),
        printable(r["path"]) if r.get("path") else "",
        "" if r.get("stream") is None else "stream" if r["stream"] else "whole answer",
    ]
    who = [_named("route", r.get("route")), _named("tenant", r.get("tenant")), _named("session", r.get("session_id"))]
    lines += ["  " + " · ".join(x for x in row if x) for row in (what, who) if any(row)]
    source, tokens, size = r.get("token_source"), r.get("prompt_tokens"), r.get("block_size")
    length = "an unknown number of tokens" if tokens is None else f"{count(tokens)} tokens"
    blocks = f" ({count(r['chain_blocks'])} full blocks of {size})" if r.get("chain_blocks") is not None and size else ""
    lines.append(f"  prompt of {length}{blocks}")
    if source is not None:
        took = f", in {seconds(r['tokenize_us'] * 1e-6)}" if r.get("tokenize_us") is not None else ""
        why = f" ({printable(r['token_reason'])})" if r.get("token_reason") else ""
        lines.append(f"  {printable(source)}: {_SOURCES.get(source, '')}{why}{took}")
    if facts.same_id:
        shown = [printable(other) for other in facts.same_id[:SAME_ID_SHOWN]]
        lines.append(f"  the client sent this id with other requests, too: {', '.join(shown)}{' ...' if shown != [*facts.same_id] else ''}")
    return lines


def _decided(facts: Facts) -> list[str]:
    r = facts.request
    versions = [f"policy {printable(r['policy'])}"]
    if r.get("policy_version") is not None:
        versions[0] += f" (version {printable(r['policy_version'])})"
    if r.get("coefficients_version") is not None:
        versions.append(f"coefficients {printable(r['coefficients_version'])}")
    if r.get("decide_us") is not None:
        versions.append(f"decided in {r['decide_us']:.0f} us")
    if r.get("waited_s"):
        versions.append(f"after {seconds(r['waited_s'])} in the router's own queue")
    chosen = next((c for c in facts.candidates if c.get("chosen")), None)
    lines = [f"Decision: {_place(chosen or r)}", "  " + ", ".join(versions)]
    if facts.earlier_decisions:
        lines.append(f"  the last of {facts.earlier_decisions + 1} decisions of this request; the others ended as attempts")
    if not facts.candidates:
        return lines
    lines += ["", "  Tokens of its beginning held by each worker, and predicted milliseconds:"]
    lines += [*indented(_candidates(facts.candidates)), ""]
    listed, considered = sum(c.get("allowed") is not False for c in facts.candidates), r.get("workers_considered")
    if considered is not None and considered > listed:
        lines.append(f"  {count(listed)} of {count(considered)} workers that could have been chosen are listed, by cost.")
    if chosen is not None:
        lines += _why(facts, chosen)
    return lines


def _candidates(candidates: Sequence[Row]) -> list[str]:
    tiers = any(c.get("overlap_cpu_tokens") or c.get("overlap_disk_tokens") for c in candidates)
    loads = any(c.get("load_s") for c in candidates)
    expected = any(c.get("speculative_tokens") for c in candidates)
    head = ["", "worker", "held", *(["gpu", "cpu", "disk"] if tiers else []), *(["expected"] if expected else [])]
    head += ["queue", "prefill", *(["load"] if loads else []), "decode", "cost", "in flight", "trust", "index at", ""]
    rows = []
    for c in candidates:
        row = [">" if c.get("chosen") else "", _place(c), count(c.get("overlap_tokens"))]
        row += [count(c.get(f"overlap_{t}_tokens")) for t in ("gpu", "cpu", "disk")] if tiers else []
        row += [f"+{count(c['speculative_tokens'])}" if c.get("speculative_tokens") else ""] if expected else []
        row += [_ms(c.get(t)) for t in ("queue_s", "prefill_s", *(["load_s"] if loads else []), "decode_s", "cost_s")]
        decoding = f" ({count(c['decoding'])} decoding)" if c.get("decoding") else ""
        row += [f"{count(c.get('in_flight'))}{decoding}", printable(c.get("trust") or UNKNOWN), _clock(c), _why_not(c)]
        rows.append(row)
    return aligned(head, rows, left={0, 1, len(head) - 4, len(head) - 3, len(head) - 2, len(head) - 1})


def _why(facts: Facts, chosen: Row) -> list[str]:
    """In words: the runner-up, the longest prefix anywhere, trust and lag."""
    r, lines = facts.request, []
    cost_known = chosen.get("cost_s") is not None
    if not cost_known:
        lines.append(
            f"  The policy {printable(r['policy'])} does not weigh costs; the seconds above are what the cost model would have said."
        )
    if r.get("runner_up_worker") is not None and r.get("margin_s") is not None:
        margin_s, other = r["margin_s"], _name_of(r["runner_up_worker"], r.get("runner_up_rank"))
        if abs(margin_s) < _SMALL_S:
            lines.append(f"  Runner-up: {other}, at the same cost.")
        elif margin_s > 0:
            lines.append(f"  Runner-up: {other}, which would have cost {seconds(margin_s)} more.")
        else:
            lines.append(f"  By the cost model {other} would have been {seconds(-margin_s)} cheaper.")
    elif r.get("margin_s") is not None:
        lines.append(f"  The runner-up would have cost {seconds(r['margin_s'])} more.")
    elif r.get("workers_considered") == 1:
        lines.append("  No other worker could have been chosen.")
    lines += _longest(facts, chosen)
    trust = chosen.get("trust")
    if trust in _TRUST:
        lines.append(f"  The index of {_place(chosen)} was {trust} at that moment: {_TRUST[trust]}.")
        lines += [
            f"    {age(r['started_at'] - c['happened_at'])} before: {printable(c['text'])}" for c in facts.changes if r.get("started_at")
        ]
    if r.get("index_lag_s") is not None:
        behind = f", and the index {seconds(r['index_behind_s'])} behind the stream" if r.get("index_behind_s") is not None else ""
        lines.append(f"  Its newest KV events that the router had applied were {seconds(r['index_lag_s'])} old{behind}.")
    return lines


def _longest(facts: Facts, chosen: Row) -> list[str]:
    """The longest prefix held anywhere, and why it was not taken."""
    r = facts.request
    most, worker = r.get("best_overlap_tokens"), r.get("best_overlap_worker")
    if most is None:
        return []
    if not most:
        return ["  No worker of the pool held the beginning of this prompt."]
    name, here = _name_of(worker, r.get("best_overlap_rank")), chosen.get("overlap_tokens")
    if here is None:
        return [f"  {name} held {count(most)} tokens, the most in the pool; how many the chosen one held is not known."]
    if here >= most:
        return [f"  No worker of the pool held more of this prompt than the {count(here)} tokens here."]
    more = f"  {name} held {count(most)} tokens, {count(most - here)} more than the chosen one"
    best = next((c for c in facts.candidates if c.get("worker") == worker and c.get("rank") in (r.get("best_overlap_rank"), None)), None)
    if best is None:
        return [f"{more}; what it would have cost was not recorded."]
    if best.get("allowed") is False:
        tried = any(a.get("worker") == worker for a in facts.attempts)
        why = (
            "it was draining"
            if best.get("draining")
            else "it had been tried before"
            if tried
            else "it was down, full, or not the one it had to go to"
        )
        return [f"{more}, but could not be chosen: {why}."]
    distrust = f" Its index was {best['trust']}: {_TRUST[best['trust']]}." if best.get("trust") in _TRUST else ""
    if best.get("cost_s") is None or chosen.get("cost_s") is None:
        return [f"{more}; the policy {printable(r['policy'])} does not look at that.{distrust}"]
    extra_s = best["cost_s"] - chosen["cost_s"]
    if extra_s < -_SMALL_S:
        return [
            f"{more}, and would have been {seconds(-extra_s)} cheaper: the policy {printable(r['policy'])} chooses by other things."
            + distrust
        ]
    parts = []
    for term, word in _TERMS:
        there_s, here_s = best.get(term), chosen.get(term)
        if there_s is None or here_s is None:
            continue
        difference_s = there_s - here_s
        if abs(difference_s) >= max(_SMALL_S, 0.02 * extra_s):
            parts.append(f"{seconds(abs(difference_s))} {'more' if difference_s > 0 else 'less'} of {word}")
    cost = f"would have cost {seconds(extra_s)} more" if extra_s > _SMALL_S else "would have cost the same"
    return [f"{more}, but {cost}{': ' + ', '.join(parts) if parts else ''}.{distrust}"]


def _shadows(facts: Facts) -> list[str]:
    if not facts.shadows:
        return []
    rows = []
    for s in facts.shadows:
        where = "the same worker" if s.get("same") else _place(s)
        margin_s = s.get("margin_s")
        cost = "" if margin_s is None or s.get("same") else f"{'+' if margin_s >= 0 else '-'}{seconds(abs(margin_s))}"
        rows.append([printable(s["policy"]), where, f"{count(s.get('predicted_tokens'))} tokens cached", cost])
    table = aligned(["policy", "would have chosen", "forecast", "cost"], rows, left={0, 1})
    return ["Other policies, asked but not followed", *indented(table)]


def _attempts(facts: Facts) -> list[str]:
    if not facts.attempts:
        return []
    lines = ["Attempts before, without an answer"]
    for i, a in enumerate(facts.attempts, start=1):
        lines.append(f"  {i}. {_place(a)} after {seconds(a.get('after_s'))}: {printable(a.get('error') or 'no reason given')}")
    return lines


def _outcome(facts: Facts, now: datetime) -> list[str]:
    r = facts.request
    if r.get("outcome_missing"):
        return ["Outcome", "  None was received in time: how it ended is not known."]
    if r.get("ended_at") is None:
        since = "" if r.get("started_at") is None else f", for {age(now - r['started_at'])} so far"
        return ["Outcome", f"  In flight{since}: no outcome yet."]
    status = "the client left before an answer" if r.get("status") is None else f"HTTP {r['status']}"
    error = f", {printable(r['error'])}" if r.get("error") else ""
    if r.get("status") is not None and r["status"] < 400 and r.get("error") in _CUT:
        error = f", then {_CUT[r['error']]}"
    lines = [f"Outcome: {status}{error}"]
    times = []
    if r.get("ttft_s") is not None:
        times.append(f"first token after {seconds(r['ttft_s'])}")
    if r.get("e2e_s") is not None:
        times.append(f"end after {seconds(r['e2e_s'])}")
    for column, word in (("engine_queue_s", "waited in the engine"), ("engine_ttft_s", "engine's own time to first token")):
        if r.get(column) is not None:
            times.append(f"{word} {seconds(r[column])}")
    if r.get("retries"):
        times.append("1 retry" if r["retries"] == 1 else f"{count(r['retries'])} retries")
    if times:
        lines.append("  " + ", ".join(times))
    cached, prompt, predicted, told = (r.get(c) for c in ("cached_tokens", "prompt_tokens", "predicted_tokens", "event_hit_tokens"))
    if cached is not None:
        share = f" ({cached / prompt:.0%})" if prompt else ""
        lines.append(f"  the engine found {count(cached)} of {count(prompt)} prompt tokens in its cache{share}")
    actual = cached if cached is not None else told
    if predicted is not None:
        guess = " (a guess from text)" if r.get("token_source") == "text" else ""
        if actual is None:
            lines.append(f"  predicted: {count(predicted)}{guess}")
        elif predicted == actual:
            lines.append(f"  predicted: {count(predicted)}{guess}, as it was")
        else:
            lines.append(
                f"  predicted: {count(predicted)}{guess}, {count(abs(predicted - actual))} too {'many' if predicted > actual else 'few'}"
            )
    if told is not None:
        agree = "" if cached is None else ", as the engine says" if cached == told else ", which is NOT what the engine says"
        lines.append(f"  told from KV events: {count(told)}{agree}")
    if r.get("completion_tokens") is not None:
        lines.append(f"  {count(r['completion_tokens'])} tokens generated")
    return lines


def _not_known(facts: Facts) -> list[str]:
    """What a reader may look for in vain, and why."""
    r, out = facts.request, []
    if r.get("policy") is not None:
        if not facts.candidates:
            out.append("the other workers: the router recorded no candidates")
        if r.get("best_overlap_tokens") is None:
            out.append("who held how much of this prompt: its prefix was unknown to the router, or not looked up")
        if r.get("trust") is None and facts.candidates:
            out.append("the trust of the chosen worker's index")
    if r.get("ended_at") is not None and r.get("status") is not None and r["status"] < 400:
        if r.get("cached_tokens") is None:
            out.append("cached tokens: the engine did not report them")
        if r.get("event_hit_tokens") is None and not r.get("decision_missing"):
            if r.get("token_source") not in ("exact", "engine"):
                why = "the names of its blocks are unknown"
            elif r.get("trust") not in (None, "exact"):
                why = "the worker's events were not complete"
            else:
                why = "not told yet, or the worker's events were not complete, or did not reach back"
            out.append(f"the hit told from KV events: {why}")
        if r.get("ttft_s") is None and r.get("stream"):
            out.append("time to first token")
    out += [f"{table}: the published file is of an earlier version, without that table" for table in facts.lacks]
    return ["Not known", *(f"  {line}" for line in out)] if out else []


# words and figures


def _ms(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s * 1e3:.1f}"


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _named(word: str, value: str | None) -> str:
    return "" if value is None else f"{word} {printable(value)}"


def _place(row: Row) -> str:
    return _name_of(row.get("worker"), row.get("rank"))


def _name_of(worker: str | None, rank: int | None) -> str:
    """Rank 0 is not said: most workers have no other."""
    return UNKNOWN if worker is None else printable(worker) + (f" rank {rank}" if rank else "")


def _clock(c: Row) -> str:
    return UNKNOWN if c.get("epoch") is None else f"{c['epoch']}/{UNKNOWN if c.get('seq') is None else c['seq']}"


def _why_not(c: Row) -> str:
    if c.get("draining"):
        return "draining"
    return "could not be chosen" if c.get("allowed") is False else ""
