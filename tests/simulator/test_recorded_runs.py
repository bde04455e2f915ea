"""The real engine's own words: the prefix cache, driven with recorded requests, gives what vLLM 0.32.0 reported and published.

The recording says when requests were admitted (their own prefill stores), when tokens were computed (their decode stores,
interpolated between) and when they ended. Everything else comes from the cache: hits, evictions, what is published.
Run c is followed up to its preemption load: preempted steps leave no trace that places them closely enough.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from simulator.kv_wire import BlockRemoved, BlockStored
from simulator.prefix_cache import ROOT_DIGEST, BlockTable, PrefixCache, block_digest
from tests.simulator.recordings import BLOCK_SIZE, Recorded, read_jsonl, read_run

USUAL_STEPS_PER_S = 100
"""The recorded machine's pace. Any value from 60 to 120 gives the same results."""


def _step_clock(requests: list[Recorded]) -> tuple[np.ndarray, np.ndarray]:
    """Recorded times, and the number of the engine's step at each. All running requests advance together, one token a step,
    so the tokens between two stores of one request count the steps between them; least squares over all such spans."""
    spans = []
    for r in requests:
        marks = [(_admitted(r)[0], 0), *((t, n - len(r.prompt)) for t, n in r.decode_stores)]
        spans += [(t0, t1, n1 - n0) for (t0, n0), (t1, n1) in pairwise(marks)]
    times = np.array(sorted({t for r in requests for t in (_admitted(r)[0], r.end)} | {s[1] for s in spans}))
    gaps = np.diff(times)
    rows = np.array([(times[:-1] >= t0) & (times[1:] <= t1) for t0, t1, _ in spans], dtype=float)
    steps = np.array([n for _, _, n in spans], dtype=float)
    # Where no span tells, about as many steps as the usual pace makes; a faint pull beside the spans' word.
    pace = 1e-3
    system = np.vstack([rows, np.eye(len(gaps)) * pace])
    wanted = np.concatenate([steps, np.minimum(gaps * USUAL_STEPS_PER_S, 50) * pace])
    taken = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return times, np.concatenate([[0.0], np.cumsum(np.maximum(taken, 1e-6))])


def _admitted(r: Recorded) -> tuple[float, int]:
    # A request that stored nothing of its own hit all its whole blocks; it was alone, so shortly after it came is right.
    return r.admitted_order or (r.start + 0.004, 0)


def _timeline(folder: str, requests: list[Recorded]) -> list[tuple[float, tuple[float, int], str, Any]]:
    operations: list[tuple[float, tuple[float, int], str, Any]] = []
    times, clock = _step_clock(requests)
    first = (0.0, 0)
    for r in requests:
        order = _admitted(r)
        operations.append((order[0], order, "admit", r))
        r.answer += [5] * (r.completion_tokens - len(r.answer))  # never fill a block, so any token will do
        at_step = float(np.interp(order[0], times, clock))
        for n in range(1, r.completion_tokens + 1):
            when = min(float(np.interp(at_step + n - 0.5, clock, times)), r.end)
            operations.append((when, order, "token" if n < r.completion_tokens else "finish", r))
    resets = (http for http in read_jsonl(f"{folder}/http") if http["path"] == "/reset_prefix_cache")
    operations += [(http["t_end"], first, "reset", http) for http in resets]
    return sorted(operations, key=lambda o: o[:2])


def _recorded_removals(batches: list[Any]) -> list[int]:
    own = {None: ROOT_DIGEST}
    removed = []
    for _ts, events, _rank in batches:
        for event in events:
            if event["type"] == "BlockStored":
                digest = own[event["parent_block_hash"]]
                for n, h in enumerate(event["block_hashes"]):
                    content = array("I", event["token_ids"][n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE]).tobytes()
                    digest = own[h] = block_digest(digest, content, event["extra_keys"][n])
            elif event["type"] == "BlockRemoved":
                removed += [int.from_bytes(own[h][-8:], "big") for h in event["block_hashes"]]
    return removed


@pytest.mark.parametrize(
    ("folder", "num_gpu_blocks", "answers"),
    [("a-int-hash", 200, 43), ("b-bytes-hash", 132, 43), ("c-preemption", 132, 44), ("e-per-request-metrics", 132, 11)],
)
def test_recorded_cached_tokens_and_evictions_come_out_of_the_prefix_cache(folder: str, num_gpu_blocks: int, answers: int) -> None:
    requests, batches = read_run(folder)
    cache = PrefixCache(num_gpu_blocks, BLOCK_SIZE)
    tables: dict[int, BlockTable] = {}
    produced: dict[int, int] = {}
    reported: list[tuple[str, int]] = []
    computed: list[tuple[str, int]] = []
    whole_run = True
    for _at, _order, kind, what in _timeline(folder, requests):
        if kind == "admit" and what.note.startswith("preemption load"):
            whole_run = False
            break
        if kind == "reset":
            assert cache.reset() is ("true" in what["response"])
        elif kind == "admit":
            table = tables[what.index] = cache.open(
                what.note, what.prompt, salt=what.salt, session_id=what.session_id, full_report=what.full_report
            )
            produced[what.index] = 0
            hit = cache.lookup(table)
            assert cache.admit(table, hit, len(what.prompt) - len(hit) * BLOCK_SIZE)
            if what.cached_tokens is not None:
                reported.append((what.note, what.cached_tokens))
                computed.append((what.note, len(hit) * BLOCK_SIZE))
        elif kind == "token":
            table = tables[what.index]
            table.append(what.answer[produced[what.index]])
            produced[what.index] += 1
            assert cache.extend(table, len(table.tokens))
        else:
            cache.release(tables[what.index])
    assert len(reported) == answers
    assert computed == reported

    events = cache.take_events()
    removed, recorded_removed = [e.block_hashes[0] for e in events if isinstance(e, BlockRemoved)], _recorded_removals(batches)
    stores = [e for e in events if isinstance(e, BlockStored)]
    recorded_stores = [e for _, events_, _ in batches for e in events_ if e["type"] == "BlockStored"]
    if whole_run:
        assert removed == recorded_removed
        assert sorted(len(e.block_hashes) for e in stores) == sorted(len(e["block_hashes"]) for e in recorded_stores)
        assert {tuple(e.token_ids) for e in stores} == {tuple(e["token_ids"]) for e in recorded_stores}
    else:
        assert len(removed) > 300 and removed == recorded_removed[: len(removed)]
        assert {tuple(e.token_ids) for e in stores} <= {tuple(e["token_ids"]) for e in recorded_stores}
