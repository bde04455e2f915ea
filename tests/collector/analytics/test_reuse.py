"""Stack distances and reuse curves against a direct simulation of caches, the public traces, and themselves after a restart."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

import collector.analytics.reuse_histogram
from collector.analytics.attributed import WINDOW_S, Attributed
from collector.analytics.reuse import GRID, LIFETIMES_S, SCALES, ReuseCurves
from collector.analytics.reuse_histogram import ENDLESS, ReuseHistogram
from collector.analytics.stack_distance import MIN_SLOTS, TICKS_PER_S, StackDistances, _depth
from schemas.tables.losses import REUSE_CURVES
from simulator.traces import claude_code, mooncake
from tests.collector.analytics.told import told
from tests.public_traces import expected, trace

BLOCK = 16
Chain = list[int]


class Lru:
    """One cache, tail-first LRU, as an ordered dictionary: the twin."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int, float] = OrderedDict()

    def use(self, chain: Chain, time_s: float, ttl_s: float = float("inf")) -> int:
        hit = 0
        for block in chain:
            if block not in self.held or time_s - self.held[block] > ttl_s:
                break
            hit += 1
        for block in reversed(chain):
            self.held[block] = max(time_s, self.held.get(block, time_s))
            self.held.move_to_end(block)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return hit


def agents(rng: random.Random, requests: int, prompts: int, length: int) -> list[Chain]:
    """Prefix-chained prompts: shared heads, growing tails, and prompts that never come again."""
    fresh = iter(range(1, 1 << 40))
    heads = [[next(fresh) for _ in range(rng.randint(1, length))] for _ in range(3)]
    living = [list(rng.choice(heads)) for _ in range(prompts)]
    out = []
    for _ in range(requests):
        i = min(int(rng.expovariate(3 / prompts)), prompts - 1)
        if rng.random() < 0.1:
            living[i] = list(rng.choice(heads))
        living[i] += [next(fresh) for _ in range(rng.randint(0, length // 2))]
        out.append(list(living[i]))
    return out


def jumble(rng: random.Random, requests: int, names: int) -> list[Chain]:
    """No chains at all: any block after any other, also twice in a prompt."""
    return [[rng.randint(1, names) for _ in range(rng.randint(0, 12))] for _ in range(requests)]


def names(chain: Chain) -> np.ndarray:
    return np.array(chain, np.uint64)


def histogram(*ttl_s: float) -> ReuseHistogram:
    return ReuseHistogram(np.array([int(s * TICKS_PER_S) for s in ttl_s], np.int64))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["chains", "jumble"])
def test_hits_equal_a_direct_simulation_at_every_capacity(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    chains = agents(rng, 80, 5, 10) if kind == "chains" else jumble(rng, 80, 30)
    distinct = len({block for chain in chains for block in chain})
    capacities = np.arange(1, distinct + 2)
    caches = [Lru(int(c)) for c in capacities]
    distances, counts = StackDistances(distinct), histogram()
    total = np.zeros(len(caches))
    for i, chain in enumerate(chains):
        total += [cache.use(chain, i) for cache in caches]
        distances.use(names(chain), i, BLOCK, counts)
        if i % 20 == 0:
            assert np.array_equal(counts.curve(capacities).blocks, total)
    curve = counts.curve(capacities)
    assert np.array_equal(curve.blocks, total)
    assert np.array_equal(curve.tokens, total * BLOCK)
    assert not curve.error_blocks.any()


@pytest.mark.parametrize("seed", range(4))
def test_lifetimes_equal_a_direct_simulation_also_when_times_step_back(seed: int) -> None:
    rng = random.Random(seed)
    lifetimes = (0.25, 1, 4, 30, 200)
    caches = [Lru(1 << 40) for _ in lifetimes]
    distances, counts = StackDistances(10_000), histogram(*lifetimes)
    total = np.zeros(len(lifetimes))
    time_s = 1_790_000_000.0
    for chain in agents(rng, 300, 8, 20):
        time_s += rng.choice([0, 0.25, 1, 8, 64, -2])
        total += [cache.use(chain, time_s, ttl_s) for cache, ttl_s in zip(caches, lifetimes, strict=True)]
        distances.use(names(chain), time_s, BLOCK, counts)
    assert np.array_equal(counts.ttl_curve().blocks, total)


def test_only_blocks_that_an_engine_may_deliver_count_and_all_are_used() -> None:
    distances, counts = StackDistances(1000), histogram()
    for _ in range(2):
        distances.use(names([1, 2, 3]), 0, BLOCK, counts, limit=2)
    assert counts.curve(np.array([1, 2, 3])).blocks.tolist() == [1, 2, 2]
    assert distances.blocks == 3


def test_positions_run_out_and_the_table_grows_without_a_trace() -> None:
    rng = random.Random(1)
    chains = agents(rng, 2500, 40, 30)
    distances, counts, cache, hits = StackDistances(1 << 20), histogram(), Lru(700), 0
    uses = 0
    for chain in chains:
        hits += cache.use(chain, 0)
        distances.use(names(chain), 0, BLOCK, counts)
        uses += len(chain)
    assert uses > 8 * MIN_SLOTS < distances.blocks * 8
    assert counts.curve(np.array([700])).blocks[0] == hits


@pytest.mark.parametrize("seed", range(4))
def test_beyond_the_budget_it_is_exact_as_far_as_it_says(seed: int) -> None:
    rng = random.Random(seed)
    budget = 300
    chains = agents(rng, 500, 25, 16)
    capacities = np.array([1, 50, budget // 2, 200, 400, 800])
    caches = [Lru(int(c)) for c in capacities]
    distances = StackDistances(budget)
    exact = np.zeros(len(capacities), int)
    for i, chain in enumerate(chains):
        counts = histogram()
        hits = np.array([cache.use(chain, i) for cache in caches])
        distances.use(names(chain), i, BLOCK, counts)
        curve = counts.curve(capacities)
        exact += ~curve.sampled
        assert not curve.sampled[capacities <= budget // 2].any()
        assert np.array_equal(curve.blocks[~curve.sampled], hits[~curve.sampled])
        assert distances.blocks <= 1.45 * budget + len(chain)
    assert distances.weight > 1
    assert exact[-1] < len(chains)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_the_newer_half_and_all_older_blocks_of_the_sample_in_the_order_of_use(seed: int) -> None:
    rng = random.Random(seed)
    budget = 560  # fills 1,024 slots to the brim
    distances, counts, everything, depth = StackDistances(budget), histogram(), Lru(1 << 40), 0
    for i, chain in enumerate(agents(rng, 800, 25, 16)):
        everything.use(chain, i)
        distances.use(names(chain), i, BLOCK, counts)
        if i % 10:
            continue
        order = list(everything.held)
        kept = distances.save()[1].tolist()
        newer = distances.blocks if distances.exact_to is None else distances.exact_to
        assert newer >= min(len(order), budget // 2)
        depth = distances.weight.bit_length() - 1
        assert kept == [b for b in order[:-newer] if _depth(np.uint64(b)) >= depth] + order[-newer:]
        again = copy.deepcopy(distances)
        again.use(names(kept[::-1]), i, BLOCK, histogram())
        assert again.save()[1].tolist() == kept
    assert depth >= 3 and len(distances._table) == 1024


def test_what_is_sampled_is_right_on_average() -> None:
    """Other names, other samples: the mean over many comes to the truth, at capacities well in the tail."""
    rng = random.Random(9)
    chains = agents(rng, 1200, 40, 24)
    capacities = np.array([500, 1000, 2000, ENDLESS])
    exact, whole = histogram(), StackDistances(1 << 20)
    for chain in chains:
        whole.use(names(chain), 0, BLOCK, exact)
    truth = exact.curve(capacities).blocks
    blocks = sum(len(chain) for chain in chains)
    shares, inside = [], []
    for run in range(16):
        counts, distances = histogram(), StackDistances(512)
        salt = np.uint64(rng.getrandbits(64))
        for chain in chains:
            distances.use(names(chain) ^ salt, 0, BLOCK, counts)
        curve = counts.curve(capacities)
        assert curve.sampled.all() and distances.weight >= 8, run
        shares.append((curve.blocks - truth) / blocks)
        inside.append(np.abs(curve.blocks - truth) <= curve.error_blocks)
    assert np.abs(np.mean(shares, axis=0)).max() < 0.015
    assert np.mean(inside) > 0.9


def test_a_histogram_of_too_many_distances_rounds_them_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector.analytics.reuse_histogram, "MAX_EVENTS", 2000)
    monkeypatch.setattr(collector.analytics.reuse_histogram, "WRITTEN", 4000)
    rng = np.random.default_rng(3)
    rounded, exact = histogram(), histogram()
    lows = rng.integers(1, 200_000, 20_000)
    for low, blocks in zip(lows.tolist(), rng.integers(1, 40, 20_000).tolist(), strict=True):
        at, mass = np.array([low, low + blocks]), np.array([[1, BLOCK, 0], [-1, -BLOCK, 0]])
        rounded.add(at, mass)
        exact.add(at, mass)
        exact._written = 0
    capacities = np.array([10, 1000, 3000, 54_321, 100_000, 150_007, ENDLESS])
    a, b = rounded.curve(capacities), exact.curve(capacities)
    assert a.rounded.all() and not b.rounded.any()
    assert (np.abs(a.blocks - b.blocks) <= a.error_blocks).all()
    assert a.error_blocks.max() <= 0.01 * b.blocks[-1]
    assert a.blocks[-1] == b.blocks[-1]
    assert len(rounded.save()[1]) < len(exact.save()[1]) / 2


def request(chain: Chain, at_s: float, pool: str = "p", worker: str = "a", rank: int | None = None, rest: int = 5) -> Attributed:
    return told(len(chain) * BLOCK + rest, at_s=at_s, chain=chain, block_size=BLOCK, pool=pool, worker=worker, rank=rank)


def unknown() -> Mapping[tuple[str, str | None], Mapping[str, int]]:
    return {}


def named(rows: Sequence[tuple[object, ...]]) -> list[dict[str, object]]:
    columns = [column.name for column in REUSE_CURVES.columns]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def curve_of(rows: list[dict[str, object]], **which: object) -> list[dict[str, object]]:
    return [row for row in rows if all(row[key] == value for key, value in which.items())]


def test_a_pool_and_its_workers_have_curves_of_their_own() -> None:
    curves = ReuseCurves(unknown, 1000)
    curves.take(
        [request([1, 2], 10, worker="a"), request([1, 2, 3], 11, worker="b"), request([1, 2], 12, worker="a"), request([9], 13, "q")]
    )
    rows = named(curves.live()["reuse_curves"])
    hits = {
        (row["pool"], row["worker"]): (row["hit_blocks"], row["hit_tokens"], row["prompt_tokens"]) for row in curve_of(rows, kind="ideal")
    }
    assert hits == {
        ("p", None): (4, 64, 7 * BLOCK + 15),
        ("p", "a"): (2, 32, 4 * BLOCK + 10),
        ("p", "b"): (0, 0, 3 * BLOCK + 5),
        ("q", None): (0, 0, BLOCK + 5),
        ("q", "a"): (0, 0, BLOCK + 5),
    }
    assert [row["capacity_blocks"] for row in curve_of(rows, pool="p", worker=None, kind="capacity")] == GRID.tolist()
    assert [row["ttl_s"] for row in curve_of(rows, pool="p", worker=None, kind="ttl")] == list(LIFETIMES_S)
    ttl = {row["ttl_s"]: row["hit_blocks"] for row in curve_of(rows, pool="p", worker="a", kind="ttl")}
    assert (ttl[1], ttl[2], ttl[86400]) == (0, 2, 2)
    assert {(row["method"], row["error"]) for row in rows} == {("exact", 0.0)}


def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed_anyway() -> None:
    curves = ReuseCurves(unknown, 1000)
    curves.take([request([1, 2, 3], 10, rest=0), request([1, 2, 3], 11, rest=0)])
    (row,) = curve_of(named(curves.live()["reuse_curves"]), kind="ideal", worker=None)
    assert (row["hit_blocks"], row["prompt_blocks"]) == (2, 6)


def test_prompts_without_names_are_on_neither_side_and_short_ones_are_asked_for() -> None:
    curves = ReuseCurves(unknown, 1000)
    curves.take([replace(request([], 10), block_size=0, prompt_tokens=999), request([], 11)])
    (row,) = curve_of(named(curves.live()["reuse_curves"]), kind="ideal", worker=None)
    assert (row["hit_tokens"], row["prompt_tokens"], row["prompt_blocks"], row["error"]) == (0, 5, 0, 0)


def test_scales_are_of_todays_capacity_by_tier_and_known_late_is_known() -> None:
    sizes: dict[tuple[str, str | None], Mapping[str, int]] = {}
    curves = ReuseCurves(lambda: sizes, 1000)
    chains = [list(range(100 * i, 100 * i + 40)) for i in (1, 2, 3, 1, 2, 3)]
    curves.take([request(chain, 10) for chain in chains])
    assert not [row for row in named(curves.live()["reuse_curves"]) if row["scale"] is not None]
    sizes["p", "a"] = {"GPU": 60, "CPU": 120}
    rows = named(curves.live()["reuse_curves"])
    assert not [row for row in curve_of(rows, worker=None) if row["scale"] is not None]
    by_tier = {
        t: [(r["scale"], r["capacity_blocks"], r["hit_blocks"]) for r in curve_of(rows, worker="a", tier=t)] for t in ("GPU", "GPU+CPU")
    }
    assert [scale for scale, *_ in by_tier["GPU"]] == list(SCALES)
    assert by_tier["GPU"][1:4] == [(0.5, 30, 0), (1.0, 60, 0), (2.0, 120, 120)]
    assert by_tier["GPU+CPU"][1:4] == [(0.5, 60, 0), (1.0, 120, 120), (2.0, 240, 120)]


def test_ranks_of_a_worker_are_caches_of_equal_shares() -> None:
    curves = ReuseCurves(lambda: {("p", "a"): {"GPU": 8}}, 1000)
    for rank in (0, 1):
        chain = [10 * rank + i for i in range(1, 5)]
        curves.take([request(chain, 10, rank=rank), request(chain, 11, rank=rank)])
    rows = curve_of(named(curves.live()["reuse_curves"]), worker="a", tier="GPU")
    assert [row["hit_blocks"] for row in rows[:4]] == [2, 4, 8, 8]


def test_windows_end_and_what_comes_late_counts_in_the_oldest_open_one() -> None:
    curves = ReuseCurves(unknown, 1000)
    curves.take([request([1], 10), request([1], WINDOW_S + 10)])
    first = named(curves.close(WINDOW_S)["reuse_curves"])
    assert {row["window_start"] for row in first} == {0}
    curves.take([request([1, 2], 20)])
    (row,) = curve_of(named(curves.live()["reuse_curves"]), kind="ideal", worker=None)
    assert (row["window_start"], row["prompt_blocks"], row["hit_blocks"]) == (WINDOW_S * 1_000_000, 3, 2)
    assert curves.close(WINDOW_S)["reuse_curves"] == []


def test_clocks_gone_wild_open_no_more_than_so_many_windows() -> None:
    curves = ReuseCurves(unknown, 1000)
    curves.take([request([1], WINDOW_S * i * 1000.0) for i in range(500)])
    rows = curve_of(named(curves.live()["reuse_curves"]), kind="ideal", worker=None)
    assert len(rows) == 64
    assert sum(row["prompt_blocks"] for row in rows) == 500  # type: ignore[misc]


def test_workers_share_one_budget_and_idle_ones_give_theirs_back() -> None:
    curves = ReuseCurves(unknown, 8192)
    rng = random.Random(2)
    fresh = iter(range(1, 1 << 40))
    for step in range(3000):
        worker = "old" if step < 100 else f"w{rng.randint(0, 7)}"
        curves.take([request([next(fresh) for _ in range(64)], step * 60.0, worker=worker)])
    assert curves.held_bytes() < 3 * 8192 * 50 + 4 * 64 * 40_000
    held = {worker: c.distances.blocks for (worker, _), c in curves._pools["p"].ranks.items()}
    assert set(held) == {"old", *(f"w{i}" for i in range(8))}
    assert sum(blocks for worker, blocks in held.items() if worker != "old") <= 1.45 * 8192 + 8 * 64
    curves.close(100 * 60.0 + 86_400)
    assert ("old", 0) not in curves._pools["p"].ranks
    assert {c.distances.budget for c in curves._pools["p"].ranks.values()} == {1024}


def test_a_budget_that_is_too_small_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tracked_blocks must be 256 to"):
        ReuseCurves(unknown, 100)


def test_loaded_in_the_middle_it_goes_on_as_if_nothing_had_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector.analytics.reuse_histogram, "MAX_EVENTS", 200)
    monkeypatch.setattr(collector.analytics.reuse_histogram, "WRITTEN", 400)
    rng = random.Random(4)
    one, other = ReuseCurves(unknown, 600), ReuseCurves(unknown, 600)
    time_s = 1_790_000_000.0
    for i, chain in enumerate(agents(rng, 900, 30, 24)):
        time_s += rng.choice([0.1, 1, 5])
        r = request(chain, time_s - rng.choice([0, 0, 3]), worker=rng.choice("abc"), rank=rng.choice([None, 1]))
        one.take([r])
        other.take([r])
        if i % 50 == 7:
            assert one.close(time_s - 60) == other.close(time_s - 60)
        if i % 30 == 0:
            again = ReuseCurves(unknown, 600)
            again.load({name: array.copy() for name, array in other.save().items()})
            other = again
            other.live()
    left, right = one.save(), other.save()
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert np.array_equal(array, right[name]), name
    assert one.live() == other.live()
    assert one.close(time_s + 2 * WINDOW_S) == other.close(time_s + 2 * WINDOW_S)


@pytest.mark.traces
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_mooncake_hits_equal_the_reference_to_four_decimals(name: str) -> None:
    reference = expected(f"mooncake_{name}")
    requests = mooncake(trace(f"mooncake-fast25/{name}_trace.jsonl.gz"))
    sizes = sorted({int(c) for table in ("lru_block_hit", "lru_token_hit") for c in reference.get(table, ())})
    capacities = np.array([*sizes, ENDLESS])
    distances = StackDistances(1 << 18)
    blocks, tokens = np.zeros(len(capacities)), np.zeros(len(capacities))
    for r in requests:
        own = histogram()
        distances.use(r.block_ids.astype(np.uint64), r.arrival_s, 512, own)
        hit = own.curve(capacities).blocks
        blocks += hit
        tokens += np.minimum(hit * 512, r.input_tokens)  # the last block may be partial
    block_hit = blocks / sum(len(r.block_ids) for r in requests)
    token_hit = tokens / sum(r.input_tokens for r in requests)
    at = {c: i for i, c in enumerate(sizes)}
    assert {c: round(block_hit[at[int(c)]], 4) for c in reference["lru_block_hit"]} == reference["lru_block_hit"]
    assert {c: round(token_hit[at[int(c)]], 4) for c in reference["lru_token_hit"]} == reference["lru_token_hit"]
    assert block_hit[-1] == pytest.approx(reference["ideal_block_hit"], abs=5e-7)
    assert token_hit[-1] == pytest.approx(reference["ideal_token_hit"], abs=5e-7)


@pytest.mark.traces
def test_claude_code_ideal_hits_of_each_conversation_equal_the_reference() -> None:
    reference = expected("claude_code_710")
    shares, hit, asked = [], 0, 0
    for session in claude_code(trace("kv-cache-tester-claude-code/claude_code_710.runs.jsonl.gz")):
        distances, ignored = StackDistances(1 << 22), histogram()
        own_hit = own = 0
        for turn in session.in_file_order():
            own_hit += distances.use(turn.block_ids().astype(np.uint64), turn.at_s, session.block_size, ignored) * session.block_size
            own += turn.input_tokens
        shares.append(own_hit / own)
        hit += own_hit
        asked += own
    assert round(hit / asked, 6) == reference["ideal_token_hit_session_local"]
    quantiles = dict(zip(("min", "p25", "median", "p75", "max"), np.quantile(shares, [0, 0.25, 0.5, 0.75, 1]), strict=True))
    quantiles["mean"] = np.mean(shares)
    assert {name: round(float(q), 4) for name, q in quantiles.items()} == reference["per_conversation_hit"]
