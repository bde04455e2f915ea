"""What a dispatch takes is given back on every way out, here and in what the replicas are told."""

import random

import numpy as np
import pytest

from router.booking import Booking
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from schemas.block_hash import HashKey
from schemas.fleet import Fleet

CHAIN = np.arange(1, 9, dtype=np.uint64)
PROMPT = Prompt("exact", 130, 130, CHAIN, 16)


class Told:
    """Replicas that write down what they are told."""

    def __init__(self):
        self.calls = []

    def reserve(self, place, prefill_s, streams, blocks, ttl_s):
        self.calls.append(("reserve", place, streams, blocks.tolist()))
        assert prefill_s > 0
        assert ttl_s > 2.0
        return 7

    def first_token(self, flight):
        self.calls.append(("first token", flight))

    def free(self, flight, kept):
        self.calls.append(("free", flight, kept))


@pytest.fixture
def pools():
    fleet = Fleet.model_validate({"pools": [{"name": "p"}], "workers": [{"pool": "p", "name": "w", "url": "http://127.0.0.1:1"}]})
    return Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(0))


def book(pools, told, prompt=PROMPT):
    decided = pools.decide(pools.by_name["p"], prompt, set(), 0.0)
    return Booking(pools, told, decided, prompt, True, 2.0, 0.0)


def state(pools):
    load = pools.by_name["p"].load
    return int(load.in_flight[0]), int(load.decoding[0]), int(pools.index.match(CHAIN, 0.1).expected[0])


@pytest.mark.parametrize("told", [None, Told()])
@pytest.mark.parametrize(("kept", "expected"), [(True, 8), (False, 0)])
def test_what_is_taken_is_given_back_once(pools, told, kept, expected):
    booking = book(pools, told)
    assert state(pools) == (1, 0, 8)
    booking.first_token(0.1)
    assert state(pools) == (1, 1, 8)
    booking.end(kept, 0.1)
    assert state(pools) == (0, 0, expected)
    booking.end(False, 0.1)
    assert state(pools)[:2] == (0, 0)


def test_replicas_are_told_the_same(pools):
    told = Told()
    booking = book(pools, told)
    booking.first_token(0.1)
    booking.end(True, 0.1)
    assert told.calls == [("reserve", ("p", "w", 0), True, CHAIN.tolist()), ("first token", 7), ("free", 7, True)]


def test_a_prompt_without_names_is_load_and_nothing_expected(pools):
    told = Told()
    book(pools, told, Prompt.unknown(4000)).end(False, 0.1)
    assert told.calls[0][3] == []
    assert state(pools) == (0, 0, 0)
