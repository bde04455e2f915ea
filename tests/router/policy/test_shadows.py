import random

import pytest

from router.policy.cost import terms
from router.policy.policies import POLICIES
from router.policy.shadows import MOST_SHADOWS, Shadows
from tests.router.policy.situations import K, holding, situation


class Broken:
    name, version = "broken", "7"

    def choose(self, now, terms, rng):
        raise ZeroDivisionError("of its own")


def test_each_shadow_tells_whom_it_would_have_chosen():
    shadows = Shadows([POLICIES["max_prefix"](K), POLICIES["least_loaded"](K)])
    now = holding([0, 3200, 0], in_flight=[4, 5, 1])
    picks = shadows.picks(now, terms(now, K), chosen=1)
    assert [(p.policy, p.target_number) for p in picks] == [("max_prefix", 1), ("least_loaded", 2)]
    by_name = {s.policy.name: s for s in shadows}
    assert (by_name["max_prefix"].agreed, by_name["least_loaded"].agreed) == (1, 0)
    assert (by_name["least_loaded"].cached_tokens, by_name["least_loaded"].chosen_cached_tokens) == (0, 3200)
    assert all(s.decisions == 1 and s.seconds > 0 for s in shadows)


def test_a_shadow_that_fails_is_counted_and_hurts_nobody(caplog):
    shadows = Shadows([Broken(), POLICIES["least_loaded"](K)])
    now = situation(in_flight=[4, 5, 1, 3])
    for _ in range(5):
        picks = shadows.picks(now, terms(now, K), chosen=0)
    assert [(p.policy, p.version, p.target_number) for p in picks] == [("broken", "7", None), ("least_loaded", "1", 2)]
    broken, sound = shadows
    assert (broken.errors, broken.decisions, broken.error) == (5, 0, "ZeroDivisionError: of its own")
    assert (sound.errors, sound.decisions) == (0, 5)
    assert len(caplog.records) == 1, "the first failure is logged, the others are counted"


def test_a_shadow_draws_from_a_source_of_its_own():
    rng = random.Random(1)
    before = rng.getstate()
    now = situation()
    picks = [Shadows([POLICIES["random"](K)], seed=3).picks(now, terms(now, K), 0) for _ in range(3)]
    assert rng.getstate() == before
    assert picks[0] == picks[1] == picks[2]


def test_too_many_are_refused():
    with pytest.raises(ValueError, match=f"at most {MOST_SHADOWS}"):
        Shadows([POLICIES["random"](K)] * (MOST_SHADOWS + 1))


def test_without_shadows_nothing_is_picked():
    now = situation()
    assert Shadows().picks(now, terms(now, K), 0) == ()
