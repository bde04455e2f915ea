"""The recorded vLLM runs: causes as told through bridge and fold, beside what the engine's own frames say of each block.

The engine's frames are read here with nothing but msgpack: a block is its tokens and all before them, and its fate is the last thing that
the frames did to it before it was stored again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from collector.analytics.attributed import Attributed
from collector.bridge.recorded import read_frames
from collector.fold import Fold
from collector.residency import Residency
from schemas.causes import Cause
from schemas.stream.base import StoredRecord
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES
from tests.collector.runs import BLOCK, RUNS, expected, kv_records, lines, requests

LATER_S = 1e9
Block = tuple[str, bytes]
"""(salt, all tokens up to its end)"""


def told(folder: str) -> list[Attributed]:
    """Each run alone: its workers know nothing of the other runs."""
    fold, end_s = Fold(Residency(1 << 14, 1 << 16, ghosts=1 << 16, seen=1 << 16, filtered=1 << 16)), 0.0
    values = [(KV_EVENTS, record) for _, records in kv_records(folder) for record in records]
    for d, o in requests(folder):
        values += [(DECISIONS, d.model_dump_json().encode()), (OUTCOMES, o.model_dump_json().encode())]
        end_s = max(end_s, o.time_s)
    for offset, (topic, value) in enumerate(values):
        fold.take((topic, 0), topic, [StoredRecord(offset, 0, b"", value, ())], end_s)
    fold.residency.workers["last_bridge_s"][: len(fold.workers)] = end_s + 60  # their bridges are alive
    fold.settle(end_s + LATER_S, end_s + LATER_S, end_s + LATER_S)
    return fold.take_told()


def stores(folder: str) -> Iterator[tuple[float, Block, str]]:
    """(when, block, what had become of it before) of each block that the engine says it stored, from its frames."""
    named: dict[object, Block] = {}
    held: set[Block] = set()
    fate: dict[Block, str] = {}
    for path in sorted((RUNS / folder).glob("frames*.jsonl.gz")):
        for frame in read_frames(path):
            time_s, events, *_ = msgspec.msgpack.decode(frame.frames[-1])
            for e in events:
                if e["type"] == "AllBlocksCleared":
                    fate |= dict.fromkeys(held, "cleared")
                    held.clear()
                elif e["type"] == "BlockRemoved":
                    for h in e["block_hashes"]:
                        held.discard(named[h])
                        fate[named[h]] = "evicted"
                else:
                    salt, before = named.get(e["parent_block_hash"], ("", b""))
                    tokens, extra = e["token_ids"], e["extra_keys"] or []
                    for i, h in enumerate(e["block_hashes"]):
                        salt = json.dumps(extra[i]) if i < len(extra) and extra[i] else salt
                        before += b"".join(t.to_bytes(4, "little") for t in tokens[i * BLOCK : (i + 1) * BLOCK])
                        named[h] = salt, before
                        yield time_s, named[h], "held" if named[h] in held else fate.get(named[h], "new")
                        held.add(named[h])


def fates(folder: str) -> dict[str, list[str]]:
    """Request -> for each block that it stored itself, what had become of it before. Of requests that ran alone."""
    log = list(stores(folder))
    want, asked = expected(), lines(RUNS / folder / "http.jsonl.gz")
    out: dict[str, list[str]] = {}
    for i, rec in enumerate(asked):
        ids = want[folder, i]["prompt_token_ids"] if (folder, i) in want else None
        if ids is None or rec.get("status") != 200:
            continue
        if any(j != i and x.get("request") and x["t_start"] < rec["t_end"] and x["t_end"] > rec["t_start"] for j, x in enumerate(asked)):
            continue
        salt = json.dumps([rec["request"]["cache_salt"]]) if rec["request"].get("cache_salt") else ""
        packed = b"".join(t.to_bytes(4, "little") for t in ids)
        mine = {(salt, packed[: 4 * BLOCK * n]): n for n in range(1, len(ids) // BLOCK + 1)}
        found = {mine[b]: fate for t, b, fate in reversed(log) if b in mine and rec["t_start"] <= t <= rec["t_end"]}
        out[f"{folder}/{i}"] = [found[n] for n in sorted(found)]
    return out


CAUSE = {Cause.FIRST_SEEN: "new", Cause.EVICTED: "evicted", Cause.CLEARED: "cleared"}


@pytest.mark.parametrize(
    ("folder", "counts"),
    [
        ("a-int-hash", {"new": 34, "evicted": 1, "cleared": 27}),
        ("b-bytes-hash", {"new": 31, "evicted": 1, "cleared": 27}),
        ("c-preemption", {"new": 31, "evicted": 28}),
        ("e-per-request-metrics", {"new": 38, "cleared": 28}),
    ],
)
def test_blocks_are_new_evicted_and_cleared_as_the_engines_own_frames_say(folder: str, counts: dict[str, int]) -> None:
    by_frames, found = fates(folder), {a.request_id: a for a in told(folder)}
    total: Counter[str] = Counter()
    for request_id, want in by_frames.items():
        a = found[request_id]
        lost = [CAUSE.get(Cause(c), Cause(c).label) for c in a.causes.tolist() if c != Cause.HIT]
        if a.prompt_tokens % BLOCK == 0 and lost == ["granularity"]:
            continue  # the last block of a wholly cached prompt
        assert lost == want, request_id
        total.update(want)
    assert dict(total) == counts


@pytest.mark.parametrize("folder", ["a-int-hash", "b-bytes-hash", "c-preemption", "d-two-dp-ranks", "e-per-request-metrics"])
def test_hits_are_the_engines_and_all_tokens_are_told_once(folder: str) -> None:
    found = {a.request_id: a for a in told(folder)}
    for (at, i), want in expected().items():
        if at != folder or want["status"] != 200 or want["prompt_token_ids"] is None:
            continue
        a = found[f"{folder}/{i}"]
        assert a.hit_tokens == (want["predicted_cached_tokens"] if want["cached_tokens"] is None else want["cached_tokens"])
        assert int(a.run_tokens.sum()) == a.prompt_tokens
        assert Cause.UNEXPLAINED not in a.run_causes
