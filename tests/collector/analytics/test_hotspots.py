"""Hotspots: bounds against an exact twin, the stories that they must tell, and equal state after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collector.analytics import hotspots, prefix_trie
from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.hotspots import COUNTED, Hotspots
from collector.store.columns import from_rows
from collector.store.publish import SCHEMAS
from schemas.causes import AVOIDABLE, Cause
from schemas.tables.losses import PREFIXES
from tests.collector.analytics.naive_hotspots import chain, covered, hidden, items_of, totals

BLOCK = 16
C = Cause


def request(
    names: np.ndarray, causes: Sequence[Cause], number: int = 0, *, tail: tuple[Cause, int] | None = None, **more: Any
) -> Attributed:
    """A prompt of whole blocks with one cause each, and tail tokens beyond."""
    runs: list[list[int]] = []
    for cause, tokens in [*((c, BLOCK) for c in causes), *([tail] if tail else [])]:
        if runs and runs[-1][0] == cause:
            runs[-1][1] += tokens
        else:
            runs.append([int(cause), tokens])
    nothing = np.full(len(names), np.nan, np.float32)
    usual: dict[str, Any] = {
        "request_id": f"q{number}", "started_at": 0.0, "prefill_s": 1000.0, "ended_s": 1001.0, "pool": "p", "worker": "w0", "rank": 0,
        "model": "m", "route": "chat", "tenant": "t", "template": None, "session_id": None, "policy": None, "block_size": BLOCK,
        "prompt_tokens": sum(n for _, n in runs), "completion_tokens": 1, "hit_tokens": BLOCK * list(causes).count(C.HIT), "chain": names,
        "causes": np.array(causes, np.uint8), "gone_s": nothing, "idle_s": nothing, "run_causes": np.array([c for c, _ in runs], np.uint8),
        "run_tokens": np.array([n for _, n in runs], np.uint32), "run_seconds": np.array([n * 0.001 for _, n in runs]),
        "diverged_at": None, "ttft_s": None, "engine_queue_s": None, "engine_ttft_s": None,
    }  # fmt: skip
    usual["started_s"] = usual.pop("started_at")
    return Attributed(**usual | more)


def spots(analysis: Hotspots) -> list[dict[str, Any]]:
    columns = [c.name for c in PREFIXES.columns]
    return [dict(zip(columns, row, strict=True)) for row in analysis.live()["prefixes"]]


def random_requests(rng: np.random.Generator, n: int, alphabet: int, depth: int) -> list[Attributed]:
    """Chains over few contents, so that they part everywhere; hits first, then any causes."""
    out = []
    for i in range(n):
        length = int(rng.integers(0, depth + 1))
        shared = rng.zipf(1.7, length) % alphabet
        hits = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else 0
        causes = [C.HIT] * hits + [C(int(c)) for c in rng.choice([1, 4, 5, 8, 9, 11, 13], length - hits)]
        tail = (C(int(rng.choice([1, 2]))), int(rng.integers(1, BLOCK))) if rng.random() < 0.5 else None
        who = {"route": f"r{rng.integers(3)}", "worker": f"w{rng.integers(70)}", "tenant": f"t{rng.integers(4)}"}
        out.append(request(chain(*shared.tolist()), causes, i, tail=tail, **who))
    return out


@pytest.mark.parametrize("seed", range(12))
def test_every_prefix_is_within_its_error_and_no_token_is_lost(seed: int) -> None:
    """Of each prefix of each chain: tracked <= true <= tracked + error, whatever was forgotten; with room for all the error is 0."""
    rng = np.random.default_rng(seed)
    nodes, depth = [(4, 6), (8, 12), (24, 12), (4096, 12)][seed % 4]
    analysis = Hotspots(nodes=nodes, share=0.05)
    requests = random_requests(rng, 300, 3 + seed, depth)
    for i in range(0, len(requests), 37):
        analysis.take(requests[i : i + 37])
        if i == 0:
            analysis._windows[3]["p"].trie.n[prefix_trie.LABEL_BUDGET] = [10_000, 40][seed // 4 % 2]
    trie, items = analysis._windows[3]["p"].trie, items_of(requests)
    exact = totals(items)
    floor = int(trie.n[prefix_trie.FLOOR])
    alive = np.flatnonzero(trie.node["parent"] != prefix_trie.GONE).tolist()
    by_name = {int(trie.node["name"][v]): v for v in alive}
    tracked: dict[int, int] = dict.fromkeys(alive, 0)
    for v in alive:
        at = v
        while at >= 0:
            tracked[at] += int(trie.said["tokens"][v].sum())
            at = int(trie.node["parent"][at])
        assert trie.node["mass"][v] == trie.said["tokens"][v].sum()
        assert trie.node["error"][v] <= floor and trie.node["edge_error"][v] <= floor
    edges = {
        int(n): v
        for v in alive
        for n in trie.names[trie.node["label_at"][v] : trie.node["label_at"][v] + trie.node["label_length"][v]].tolist()
    }
    assert set(by_name) <= set(edges) <= set(exact)
    for name, true in exact.items():
        v = edges.get(name)
        error = floor if v is None else int(trie.node["error"][v]) if by_name.get(name) == v else int(trie.node["edge_error"][v])
        assert 0 <= true - (0 if v is None else tracked[v]) <= error
    assert trie.said["tokens"].sum() == trie.n[prefix_trie.WEIGHT] == sum(item.weight for item in items)
    assert floor * (nodes - 2) <= 2 * (trie.n[prefix_trie.WEIGHT] + trie.n[prefix_trie.MOVED]) or seed // 4 % 2
    if nodes == 4096 and not seed // 4 % 2:
        assert floor == 0
        assert (
            sum(n for v, n in tracked.items() if trie.node["parent"][v] < 0) + trie.said["tokens"][nodes:].sum()
            == trie.n[prefix_trie.WEIGHT]
        )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nodes", [16, 4096])
def test_hotspots_are_within_their_bounds_and_none_is_missing(seed: int, nodes: int) -> None:
    rng = np.random.default_rng(100 + seed)
    share = 0.03
    requests = random_requests(rng, 400, 3 + seed, 10)
    analysis = Hotspots(nodes=nodes, share=share)
    analysis.take(requests)
    items, found = items_of(requests), spots(analysis)
    lost, exact = sum(item.weight for item in items), totals(items)
    floor = int(analysis._windows[3]["p"].trie.n[prefix_trie.FLOOR])
    reported = {s["prefix"]: s for s in found if s["prefix"]}
    mine = covered(items, set(reported))
    assert sum(s["lost_tokens"] for s in found) <= lost
    for s in found:
        assert s["lost_tokens"] >= share * lost and s["requests"] >= 2
        assert sum(part["tokens"] for part in s["by_cause"]) == s["lost_tokens"]
        assert s["avoidable_tokens"] == sum(p["tokens"] for p in s["by_cause"] if C[p["cause"].upper()] in AVOIDABLE)
        assert s["lost_s"] == pytest.approx(s["lost_tokens"] * 0.001)
        below = sum(other["error_tokens"] for other in found if other["parent_prefix"] == s["prefix"])
        if s["prefix"]:
            assert exact[s["prefix"]] - s["error_tokens"] <= s["total_tokens"] <= exact[s["prefix"]]
            true = sum(item.weight for item in mine.get(s["prefix"], []))
            assert true - s["error_tokens"] <= s["lost_tokens"] <= true + below
        else:
            here = [i for i in mine.get(0, []) if (i.request.route, i.request.tenant) == (s["route"], s["tenant"])]
            assert abs(s["lost_tokens"] - sum(i.weight for i in here)) <= s["error_tokens"]
    for name, weights in hidden(items, set(reported)).items():
        assert sum(weights) - max(weights) <= share * lost + floor or sum(weights) <= share * lost + floor, name
    if nodes == 4096:
        assert all(s["error_tokens"] == 0 for s in found if s["prefix"])
        for prefix, s in reported.items():
            here = mine[prefix]
            assert s["requests"] == len(here)
            assert s["workers"] == len({min(63, int(i.request.worker[1:])) for i in here}) or s["workers"] <= 64
            assert s["example_request_id"] == f"q{max(int(i.request.request_id[1:]) for i in here)}"


def test_a_system_prompt_that_many_workers_compute_again_is_the_prefix_where_its_sessions_part() -> None:
    """Whole sessions are one run of one cause: only where they part tells what they share."""
    system = list(range(100))
    requests = [
        request(chain(*system, *range(1000 * i, 1000 * i + 50)), [C.EVICTED] * 150, i, worker=f"w{i % 5}", route="agent")
        for i in range(1, 300)
    ]
    analysis = Hotspots()
    analysis.take(requests)
    (spot,) = spots(analysis)
    assert spot["prefix"] == int(chain(*system)[-1])
    assert (spot["depth_tokens"], spot["lost_tokens"], spot["requests"]) == (100 * BLOCK, 299 * 150 * BLOCK, 299)
    assert (spot["workers"], spot["route"], spot["error_tokens"], spot["parent_prefix"]) == (5, "agent", 0, None)
    assert (spot["top_cause"], spot["avoidable_tokens"], spot["example_request_id"]) == ("evicted", spot["lost_tokens"], "q299")


def test_prompts_that_differ_from_their_first_block_on_meet_at_the_root_of_their_kind() -> None:
    """A timestamp at the head: nothing is shared but the route."""
    odd = [request(chain(5000 + i, *range(40)), [C.FIRST_SEEN] + [C.DIVERGED] * 40, i, route="dated", template="v7") for i in range(5000)]
    even = [request(chain(*range(60), i), [C.HIT] * 60 + [C.FIRST_SEEN], i, route="fine") for i in range(500)]
    analysis = Hotspots()
    analysis.take([*odd, *even])
    (spot,) = spots(analysis)
    assert (spot["prefix"], spot["depth_tokens"], spot["route"], spot["template"]) == (0, 0, "dated", "v7")
    assert (spot["lost_tokens"], spot["top_cause"], spot["requests"]) == (5000 * 40 * BLOCK, "diverged", 5000)
    assert (spot["copies"], spot["error_tokens"]) == (None, 0)


def test_prompts_that_part_behind_a_cached_beginning_meet_at_its_end() -> None:
    head = list(range(30))
    requests = [request(chain(*head, 900 + i, *range(20)), [C.HIT] * 30 + [C.FIRST_SEEN] + [C.DIVERGED] * 20, i) for i in range(3000)]
    analysis = Hotspots(copies=lambda prefix: 3 if prefix == int(chain(*head)[-1]) else None)
    analysis.take([replace(r, snippet="You are") for r in requests])
    (spot,) = spots(analysis)
    assert (spot["prefix"], spot["depth_tokens"], spot["copies"], spot["snippet"]) == (int(chain(*head)[-1]), 30 * BLOCK, 3, "You are")
    assert spot["lost_tokens"] == 3000 * 20 * BLOCK


def test_a_heavy_session_has_its_own_row_and_its_template_counts_only_the_rest() -> None:
    system = list(range(10))
    session = [*system, *range(100, 130)]
    many = [request(chain(*system, 1000 + i), [C.CLEARED] * 11, i) for i in range(100)]
    again = [request(chain(*session), [C.MISROUTED] * 40, 500 + i, tenant="big") for i in range(10)]
    analysis = Hotspots()
    analysis.take([*many, *again])
    by_prefix = {s["prefix"]: s for s in spots(analysis)}
    top, below = by_prefix[int(chain(*system)[-1])], by_prefix[int(chain(*session)[-1])]
    assert below["parent_prefix"] == top["prefix"]
    assert (below["lost_tokens"], below["total_tokens"], below["tenant"], below["top_cause"]) == (6400, 6400, "big", "misrouted")
    assert (top["lost_tokens"], top["total_tokens"], top["tenant"], top["top_cause"]) == (17600, 24000, "t", "cleared")


def test_what_nobody_can_act_on_or_nobody_knows_is_no_hotspot() -> None:
    new = [request(chain(*range(20)), [C.FIRST_SEEN] * 20, i, tail=(C.GRANULARITY, 5)) for i in range(9)]
    silent = [request(chain(*range(20)), [C.UNEXPLAINED] * 20, i, hit_tokens=None) for i in range(9)]
    once = [request(chain(7, 8, 9), [C.EVICTED] * 3)]
    analysis = Hotspots()
    analysis.take([*new, *silent, *once])
    assert spots(analysis) == []
    assert not {C.HIT, C.FIRST_SEEN, C.GRANULARITY} & COUNTED


def test_ages_are_medians_within_a_fifth_and_unknown_seconds_are_null() -> None:
    names = chain(*range(9))
    gone, idle = np.full(9, np.nan, np.float32), np.full(9, np.nan, np.float32)
    gone[:] = [1, 2, 5, 40, 60, 80, 600, 700, 90_000]
    idle[3] = 0.001
    r = [request(names, [C.EVICTED] * 9, i, gone_s=gone, idle_s=idle, run_seconds=np.array([np.nan])) for i in range(2)]
    analysis = Hotspots()
    analysis.take(r)
    (spot,) = spots(analysis)
    assert spot["gone_p50_s"] == pytest.approx(60, rel=0.2)
    assert spot["idle_p50_s"] == 0.01
    assert spot["lost_s"] is None


def test_windows_and_pools_are_apart_close_in_order_and_are_bounded() -> None:
    def pair(at_s: float, pool: str) -> list[Attributed]:
        return [request(chain(1, 2, 3), [C.EVICTED] * 3, i, prefill_s=at_s, pool=pool) for i in range(2)]

    analysis = Hotspots()
    analysis.take([*pair(0.0, "a"), *pair(WINDOW_S + 1.0, "b"), *pair(2 * WINDOW_S + 1.0, "a")])
    assert [(s["window_start"], s["pool"]) for s in spots(analysis)] == [
        (0, "a"), (WINDOW_S * 10**6, "b"), (2 * WINDOW_S * 10**6, "a")
    ]  # fmt: skip
    closed = analysis.close(WINDOW_S)["prefixes"]
    assert [row[0] for row in closed] == [0]
    analysis.take(pair(5.0, "late"))
    assert [(s["window_start"], s["pool"]) for s in spots(analysis)][:2] == [(WINDOW_S * 10**6, "b"), (WINDOW_S * 10**6, "late")]
    for i in range(100):
        analysis.take(pair(WINDOW_S + 1.0, f"pool {i}"))
    pools = [s["pool"] for s in spots(analysis) if s["window_start"] == WINDOW_S * 10**6]
    assert len(pools) == hotspots.POOLS + 1 and None in pools
    assert analysis.held_bytes() < hotspots.TRIES * 7_000_000


def test_a_collector_that_catches_up_counts_each_window_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many windows one batch holds; tries are kept of the newest alone, and late requests count in the oldest of these."""

    def pair(window: int) -> list[Attributed]:
        return [request(chain(1, 2, 3), [C.EVICTED] * 3, i, prefill_s=window * WINDOW_S + 1.0) for i in range(2)]

    analysis, loaded = Hotspots(), Hotspots()
    monkeypatch.setattr(hotspots, "TRIES", 4)
    monkeypatch.setattr(hotspots, "SETTLED_WINDOWS", 50)
    analysis.take([r for window in range(40) for r in pair(window)])
    assert [s["window_start"] for s in spots(analysis)] == [w * WINDOW_S * 10**6 for w in range(40)]
    assert analysis.held_bytes() < 4 * 7_000_000
    analysis.take([*pair(3), *pair(0)])
    assert [(s["window_start"] // WINDOW_S // 10**6, s["requests"]) for s in spots(analysis)[35:]] == [
        (35, 2), (36, 6), (37, 2), (38, 2), (39, 2)
    ]  # fmt: skip
    loaded.load(analysis.save())
    assert loaded.live() == analysis.live()
    assert [row[0] for row in loaded.close(38 * WINDOW_S)["prefixes"]] == [w * WINDOW_S * 10**6 for w in range(38)]
    assert len(spots(loaded)) == 2
    for wild in range(200):
        loaded.take(pair(1000 + wild))
    assert len(spots(loaded)) <= 50 + 4


@pytest.mark.parametrize("nodes", [8, 64])
def test_names_that_are_no_chain_do_neither_hang_nor_break_it(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    analysis, tokens = Hotspots(nodes=nodes, share=1e-9), 0
    for number in range(2000):
        names = rng.integers(0, 6, rng.integers(1, 12)).astype(np.uint64)
        analysis.take([request(names, [C.EVICTED] * len(names), number)])
        tokens += BLOCK * len(names)
    trie = analysis._windows[3]["p"].trie
    assert trie.n[prefix_trie.WEIGHT] == trie.said["tokens"].sum() == tokens
    used = trie.node["parent"] != prefix_trie.GONE
    assert used.sum() == (trie.slot_node >= 0).sum() == nodes - trie.n[prefix_trie.FREE]
    assert sum(spot["lost_tokens"] for spot in spots(analysis)) <= tokens


def test_a_time_beyond_all_buckets_counts_in_the_last() -> None:
    names = np.array([7], np.uint64)
    for gone_s in (1e9, np.inf):
        analysis = Hotspots()
        analysis.take([request(names, [C.EVICTED], i, gone_s=np.array([gone_s], np.float32)) for i in range(2)])
        (spot,) = spots(analysis)
        assert spot["gone_p50_s"] == prefix_trie.bucket_middle_s(prefix_trie.HISTOGRAM_BUCKETS - 1)


def test_rows_fit_the_published_table() -> None:
    analysis = Hotspots()
    analysis.take([request(chain(1, 2, 3), [C.EVICTED] * 3, i, route="🦊" * 50) for i in range(2)])
    table = from_rows(SCHEMAS["prefixes"], analysis.live()["prefixes"])
    assert table.num_rows == 1
    assert table["by_cause"].to_pylist() == [[{"cause": "evicted", "tokens": 96}]]


@pytest.mark.parametrize("seed", range(3))
def test_a_loaded_state_goes_on_as_if_nothing_had_happened_whatever_the_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 600, 9, 20)
    moved = random_requests(rng, 100, 9, 20)
    whole, first = Hotspots(nodes=32), Hotspots(nodes=32)
    whole.take(requests[:350])
    for r in requests[:350]:
        first.take([r])
    second = Hotspots(nodes=32)
    second.load({name: array.copy() for name, array in first.save().items()})
    assert second.live() == whole.live()
    for analysis in (whole, second):
        analysis.take(requests[350:])
        analysis.take(moved)
    assert whole.live() == second.live()
    assert whole.close(1e6) == second.close(1e6)
    assert whole.save()["names"].tolist() == second.save()["names"].tolist()
