import random
from collections import Counter

import numpy as np
import pytest

from router.index.prefix_index import BLIND
from router.policy.baselines import BoundedLoadHash, CacheAware, overlap
from router.policy.cost import terms
from router.policy.policies import POLICIES
from tests.router.policy.situations import K, choose, chosen, holding, situation


def test_round_robin_takes_turns_and_leaves_out_who_is_not_allowed():
    policy = POLICIES["round_robin"](K)
    now = situation(allowed=[True, True, False, True])
    assert [policy.choose(now, terms(now, K), random.Random(1)).worker for _ in range(6)] == [0, 1, 3, 0, 1, 3]


def test_least_loaded_takes_the_fewest_in_flight():
    assert chosen(situation(in_flight=[3, 2, 1, 2]), "least_loaded") == 2


def test_random_takes_anyone():
    assert {chosen(situation(), "random", seed) for seed in range(60)} == {0, 1, 2, 3}


def test_a_session_stays_where_it_is_whatever_is_there():
    for session in range(40):
        first = chosen(situation(session=session), "session_hash")
        assert chosen(holding([0, 7984, 0, 0], in_flight=[5, 0, 50, 2], session=session, root=3), "session_hash", seed=9) == first


def test_without_a_session_the_first_block_decides_and_without_it_chance():
    assert len({chosen(situation(root=77), "session_hash", seed) for seed in range(20)}) == 1
    assert len({chosen(situation(), "session_hash", seed) for seed in range(40)}) == 4


def test_only_the_sessions_of_a_worker_that_left_move():
    here = [chosen(situation(8, session=s), "session_hash") for s in range(400)]
    allowed = [w != 3 for w in range(8)]
    after = [chosen(situation(8, session=s, allowed=allowed), "session_hash") for s in range(400)]
    assert all(a == b for a, b in zip(here, after, strict=True) if a != 3)
    moved = Counter(b for a, b in zip(here, after, strict=True) if a == 3)
    assert len(moved) > 4, "they spread over the others"


def test_bounded_load_goes_past_who_has_more_than_his_share():
    session = next(s for s in range(100) if chosen(situation(session=s), "session_hash") == 1)
    assert chosen(situation(session=session, in_flight=[4, 4, 4, 4]), "bounded_load_hash") == 1
    assert chosen(situation(session=session, in_flight=[4, 7, 4, 4]), "bounded_load_hash") != 1  # ceil(1.25 * 20 / 4) = 7


@pytest.mark.parametrize("seed", range(10))
def test_nobody_gets_above_the_bound(seed):
    rng, policy, flights = random.Random(seed), BoundedLoadHash(), np.zeros(6, np.int64)
    for i in range(300):
        now = situation(6, session=i % 3, in_flight=flights)
        worker = policy.choose(now, terms(now, K), rng).worker
        flights[worker] += 1
        assert flights[worker] <= np.ceil(1.25 * flights.sum() / 6)


@pytest.mark.parametrize(
    ("held", "in_flight", "worker"),
    [
        ([0, 2416, 0, 0], [0, 60, 0, 0], 1),  # over 0.3 of the prompt
        ([0, 2416, 0, 0], [0, 65, 0, 0], {0, 2, 3}),  # 65 > 64 apart, and 65 > 0
        ([0, 2416, 0, 0], [200, 265, 200, 201], 1),  # apart, but not 1.5 times
        ([0, 2384, 0, 0], [0, 0, 0, 0], {0, 1, 2, 3}),  # not over 0.3
    ],
)
def test_the_threshold_rule(held, in_flight, worker):
    got = {chosen(holding(held, in_flight=in_flight), "cache_aware", seed) for seed in range(40)}
    assert got == (worker if isinstance(worker, set) else {worker})


def test_the_threshold_rule_gives_cold_prompts_to_who_was_given_least():
    policy, rng = CacheAware(), random.Random(1)
    for tokens in (9000, 100, 100, 100):
        now = situation(prompt_tokens=tokens)
        policy.choose(now, terms(now, K), rng)
    now = situation(prompt_tokens=50)
    counts = Counter(policy.choose(now, terms(now, K), rng).worker for _ in range(30))
    assert len(counts) == 3, "the one that has 9000 gets nothing"


def test_the_threshold_rule_takes_who_has_a_gone_workers_number_for_one_that_was_given_nothing():
    policy, rng, keys = CacheAware(), random.Random(1), np.arange(3, dtype=np.uint64)
    for tokens in (9000, 9000, 9000):
        now = situation(3, prompt_tokens=tokens, keys=keys)
        policy.choose(now, terms(now, K), rng)
    now = situation(3, prompt_tokens=100, keys=[0, 77, 2])
    assert [policy.choose(now, terms(now, K), rng).worker for _ in range(5)] == [1] * 5


def test_a_score_is_what_was_minimised_and_stays_so():
    policy, rng = CacheAware(), random.Random(1)
    now = situation()
    choices = [policy.choose(now, terms(now, K), rng) for _ in range(4)]
    assert [c.score[c.worker] for c in choices] == [0.0] * 4


def test_max_prefix_takes_the_longest_whatever_the_load():
    assert chosen(holding([0, 160, 320, 0], in_flight=[0, 0, 500, 0]), "max_prefix") == 2
    assert chosen(holding([320, 160, 320, 320], in_flight=[4, 0, 2, 3]), "max_prefix") == 2
    assert chosen(holding([320, 0, 160, 0], trust=[BLIND, 2, 2, 2]), "max_prefix") == 2


def test_what_a_blind_index_says_is_no_overlap_but_what_is_expected_is():
    now = holding([3200, 3200], expected=[4800, 4800], trust=[BLIND, 2])
    assert overlap(now).tolist() == [1600, 4800]
    assert overlap(holding([8000])).tolist() == [7984], "the last token is always computed"
    assert choose(now, "max_prefix").worker == 1
