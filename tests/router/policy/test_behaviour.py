"""What the policy brings about over many requests, on a fleet in virtual time (virtual_fleet.py)."""

from __future__ import annotations

import itertools
import random
import zlib
from functools import lru_cache

import numpy as np
import pytest

from router.policy.book import CoefficientBook
from router.policy.cost import Rates
from router.policy.policies import POLICIES
from simulator.sessions import AgentSession, sessions
from simulator.settings import TrafficSettings
from tests.router.policy.virtual_fleet import BLOCK, Ask, VirtualFleet


def tokens(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, n).astype(np.uint32)


def poisson(fleet: VirtualFleet, make, rate: float, until_s: float, seed: int = 1, from_s: float = 0.0) -> None:
    """Requests at random times: make(i) gives the ids of the i-th."""
    rng, at_s, i = random.Random(seed), from_s, 0
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        fleet.at(at_s, fleet.ask(make(i), output_tokens=rng.randint(20, 150)))
        i += 1


def fan_outs(speculative: bool) -> tuple[VirtualFleet, list[list[Ask]]]:
    """Now and then eight siblings on a cold prefix of 12k tokens, about 1.3 times a second over eight workers."""
    fleet, rng, at_s, groups = VirtualFleet(8, speculative=speculative), random.Random(2), 0.0, []
    for group in range(25):
        at_s += rng.expovariate(1.3)
        prefix = tokens(group, 12_000)
        groups.append([fleet.ask(np.concatenate([prefix, tokens(1000 * group + i + 100, 200)])) for i in range(8)])
        for sibling, ask in enumerate(groups[-1]):
            fleet.at(at_s + 0.002 * sibling, ask)
    return fleet.run(), groups


def test_siblings_on_one_cold_prefix_follow_each_other_and_are_answered_sooner():
    (together, groups), (apart, _) = fan_outs(True), fan_outs(False)
    assert np.mean([len({a.worker for a in group}) for group in groups]) < 1.5, "to one worker, unless the cost says otherwise"
    assert together.mean_ttft_s < 0.6 * apart.mean_ttft_s
    assert together.hit_rate > 0.8 > 0.3 > apart.hit_rate


@pytest.mark.parametrize("shared", [BLOCK, 2000])
@pytest.mark.parametrize("rate", [4.0, 16.0])
def test_a_prefix_that_all_share_does_not_pull_everything_onto_one_worker(shared, rate):
    """With little to do the few that hold it share the work (that is sooner); with more, all do."""

    def run(policy):
        fleet = VirtualFleet(8, policy)
        poisson(fleet, lambda i: np.concatenate([prefix, tokens(i + 1, 3000)]), rate, 70.0)
        return fleet.run()

    prefix = tokens(0, shared)
    fleet, load = run("cost"), run("least_loaded")
    counts = np.bincount([a.worker for a in fleet.done if a.arrived_s > 20], minlength=8)
    assert counts.max() < (1.6 if rate > 8 or shared == BLOCK else 2.6) * counts.mean()
    assert fleet.mean_ttft_s < 1.05 * load.mean_ttft_s


def test_cold_prompts_spread_over_idle_workers():
    fleet = VirtualFleet(8)
    poisson(fleet, lambda i: tokens(i, 800), 1.0, 400.0)
    counts = np.bincount([a.worker for a in fleet.run().done], minlength=8)
    assert counts.min() > 0.5 * counts.mean()
    assert counts.max() < 1.6 * counts.mean()


def grown(**rules) -> VirtualFleet:
    """Eight warm workers with sessions and cold prompts; at 60 s four join."""
    fleet = VirtualFleet(8, **rules)
    contexts = [tokens(s, 20_000) for s in range(40)]
    poisson(fleet, lambda i: contexts[i % 40][: 4000 + 200 * (i // 40)] if i % 3 else tokens(10_000 + i, 6000), 12.0, 120.0)
    fleet.at(60.0, lambda: fleet.join("n0", "n1", "n2", "n3"))
    return fleet.run()


def test_new_workers_are_not_flooded():
    def cold_tokens(fleet, from_s, to_s):
        mine = [a for a in fleet.done if a.worker >= 8 and from_s <= a.arrived_s < to_s]
        return sum(a.tokens - a.hit_tokens for a in mine) / 4 / (to_s - from_s)

    capped, free = grown(cold_tokens_per_s=1500.0), grown(cold_tokens_per_s=0.0)
    assert cold_tokens(free, 60, 70) > 3000, "else there is nothing to cap"
    assert cold_tokens(capped, 60, 70) < 1500 + 6000 / 10 + 1500 / 10 + 200, "the rate, and a prompt and a bucket beyond"
    assert cold_tokens(capped, 60, 70) > 500, "they are warmed"
    assert capped.mean_ttft_s < 1.5 * free.mean_ttft_s


def test_a_draining_worker_keeps_its_sessions_and_empties():
    fleet = VirtualFleet(4)
    contexts = [tokens(s, 30_000) for s in range(24)]
    for s, context in enumerate(contexts):
        for turn in range(6 if s % 2 else 14):
            fleet.at(2.0 + s * 0.1 + turn * 5.0, fleet.ask(context[: 3000 + 1000 * turn], output_tokens=60))
    poisson(fleet, lambda i: tokens(5000 + i, 2000), 2.0, 90.0)
    fleet.at(20.0, lambda: fleet.pool.drain("w1"))
    fleet.run()
    after = [a for a in fleet.done if a.worker == 1 and a.arrived_s > 20.0]
    assert after, "sessions go on there"
    assert all(a.hit_tokens >= 0.5 * a.tokens for a in after)
    assert not [a for a in after if a.arrived_s > 75.0], "and when they are over, nothing comes any more"
    assert not fleet.pool.load.in_flight[1]


def test_no_herd_follows_a_load_that_is_a_second_old():
    """The engines' own load is read once a second. A burst between two readings spreads all the same."""
    fleet = VirtualFleet(8)

    def read(number, busy):
        fleet.pool.others.hear(number, float(fleet.pool.load.in_flight[number]) + busy, 0.0, fleet.now_s)

    for second in range(20):
        for number in range(8):
            busy = 0 if number == 0 else 6  # others' requests on all but one
            fleet.at(second + 0.001 * number, lambda n=number, b=busy: read(n, b))
    poisson(fleet, lambda i: tokens(i, 3000), 25.0, 20.0)
    fleet.run()
    counts = np.bincount([a.worker for a in fleet.done], minlength=8)
    assert counts[0] == counts.max(), "it has most room"
    assert counts[0] < 2.0 * counts.mean()
    runs = [a.worker for a in sorted(fleet.done, key=lambda a: a.arrived_s)]
    longest = max(sum(1 for _ in g) for _, g in itertools.groupby(runs))
    assert longest <= 5


def test_a_fast_worker_takes_more_of_a_mixed_fleet():
    fast = Rates(a=1 / 14_000, b=1.3e-9)
    slow = Rates(a=4 / 14_000, b=4 * 1.3e-9)
    hardware = ["fast", "slow"] * 3

    def run(book):
        fleet = VirtualFleet(6, hardware=hardware, book=book)
        for number, name in enumerate(hardware):
            fleet.engines[number].speed = 1.0 if name == "fast" else 0.25
        poisson(fleet, lambda i: tokens(i, 6000), 4.0, 120.0)
        return fleet.run()

    knowing, not_knowing = run(CoefficientBook(fast, {"fast": fast, "slow": slow})), run(CoefficientBook(fast))
    assert knowing.mean_ttft_s < 0.9 * not_knowing.mean_ttft_s
    assert sum(knowing.shares[w] for w in (0, 2, 4)) > 2.5 * sum(knowing.shares[w] for w in (1, 3, 5))


@lru_cache(100_000)
def words(text: str) -> np.ndarray:
    return np.array([zlib.crc32(w.encode()) & 0x7FFFFFFF for w in text.split()], np.uint32)


def ids_of(ask) -> np.ndarray:
    return np.concatenate([words(str(ask.tools)), *(words(f"<{m['role']}> {m['content']}") for m in ask.messages)])


TRAFFIC = TrafficSettings(
    templates=8, system_words=1500, tools=6, user_words=(60, 300), tool_words=(300, 1500), turns=(6, 16), think_s=(1.0, 6.0),
    max_prompt_tokens=24_000, answer_tokens=(30, 150),
)  # fmt: skip


def agents(policy: str, seed: int, concurrent: int = 64, until_s: float = 60.0) -> VirtualFleet:
    """Sessions in a closed loop: the next turn comes when the last one has ended, and some thought. Four workers that are a third busy,
    whose caches hold most of the sessions' prefixes but not all."""
    fleet = VirtualFleet(4, policy, capacity_tokens=100_000)
    for engine in fleet.engines:
        engine.speed = 0.6
    fresh, rng = sessions(TRAFFIC.model_copy(update={"seed": seed})), random.Random(6)

    def turn(session: AgentSession) -> None:
        if fleet.now_s > until_s:
            return
        if session.over:
            session = next(fresh)
        for side in session.subagents():
            fleet.at(fleet.now_s, fleet.ask(ids_of(side), output_tokens=side.max_tokens, session=session.session_id))
        ask = session.ask()
        ids = ids_of(ask)

        def ended(now_s: float) -> None:
            session.hear(" ".join(f"a{rng.randrange(5000)}" for _ in range(ask.max_tokens)), len(ids))
            fleet.at(now_s + session.think_s(), lambda: turn(session))

        fleet.at(fleet.now_s, fleet.ask(ids, output_tokens=ask.max_tokens, session=session.session_id, then=ended))

    for _ in range(concurrent):
        session = next(fresh)
        fleet.at(rng.uniform(0, 6), lambda s=session: turn(s))
    return fleet.run()


def test_on_agents_traffic_the_cost_keeps_up_with_the_threshold_rule_and_is_before_all_others():
    """Whether the cost or the threshold rule is better turns on the sessions: their means are compared, the others' one run."""
    seeds = (1, 2, 3, 4)
    cost, rule = ([agents(policy, seed) for seed in seeds] for policy in ("cost", "cache_aware"))
    assert np.mean([r.hit_rate for r in cost]) > np.mean([r.hit_rate for r in rule]) - 0.01
    assert np.mean([r.mean_ttft_s for r in cost]) < 1.1 * np.mean([r.mean_ttft_s for r in rule])
    for policy in POLICIES.keys() - {"cost", "cache_aware"}:
        run = agents(policy, seeds[-1])
        assert cost[-1].hit_rate > run.hit_rate + 0.01, policy
        assert cost[-1].mean_ttft_s < 0.8 * run.mean_ttft_s, policy
