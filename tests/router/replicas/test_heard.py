"""What other replicas tell is booked, and whatever is lost or dies on the way, no load stays behind."""

import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.replicas.heard import MAX_REPLICAS, Heard
from router.replicas.messages import Message, decode, encode
from router.replicas.outbox import Outbox, Sender
from schemas.block_hash import HashKey
from schemas.fleet import Fleet

SILENCE_S = 3.0
BLOCKS = np.arange(1, 9, dtype=np.uint64)


def fleet(workers=("w0", "w1")):
    return Fleet.model_validate(
        {"pools": [{"name": "p"}], "workers": [{"pool": "p", "name": w, "url": f"http://127.0.0.1:{i + 1}"} for i, w in enumerate(workers)]}
    )


def make_pools(workers=("w0", "w1")):
    return Pools(fleet(workers), {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(0))


@pytest.fixture
def pools():
    return make_pools()


@pytest.fixture
def heard(pools):
    return Heard(pools, "own", "key", SILENCE_S)


@pytest.fixture
def peer():
    return Outbox(Sender("peer", "run-1", "key"))


def hear(heard, message, now_s=0.0):
    heard.hear(decode(encode(message)), now_s)


def load(pools):
    found = pools.by_name["p"].load
    return found.in_flight.tolist(), found.decoding.tolist()


def expected(pools, now_s=0.0):
    slots = [pools.by_name["p"].slots_of(n)[0].number for n in (0, 1)]
    return pools.index.match(BLOCKS, now_s).expected[slots].tolist()


def test_a_request_elsewhere_is_load_and_expected_blocks_here(pools, heard, peer):
    flight = peer.reserve(("p", "w1", 0), 0.5, True, BLOCKS, 4.0)
    hear(heard, peer.news(), 10.0)
    assert load(pools) == ([0, 1], [0, 0])
    assert pools.by_name["p"].load.queue_s(10.1).tolist() == [0, pytest.approx(0.4)]
    assert expected(pools, 13.9) == [0, 8]
    assert expected(pools, 14.1) == [0, 0]
    peer.first_token(flight)
    hear(heard, peer.news(), 10.6)
    assert load(pools) == ([0, 1], [0, 1])
    assert heard.flights == 1
    peer.free(flight, True)
    hear(heard, peer.news(), 11.0)
    assert load(pools) == ([0, 0], [0, 0])
    assert heard.flights == 0


@pytest.mark.parametrize(("kept", "left"), [(True, [8, 0]), (False, [0, 0])])
def test_blocks_stay_expected_only_where_they_will_be(pools, heard, peer, kept, left):
    flight = peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    peer.free(flight, kept)
    hear(heard, peer.news())
    assert expected(pools, 1.0) == left


def test_what_is_heard_of_ourselves_counts_nothing(pools, heard):
    own = Outbox(Sender("peer", "own", "key"))
    own.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    hear(heard, own.state())
    assert load(pools) == ([0, 0], [0, 0])
    assert heard.names == ()
    assert heard.counts.own == 1


def test_a_replica_that_says_goodbye_leaves_at_once(pools, heard, peer, caplog):
    caplog.set_level(logging.INFO)
    peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    hear(heard, peer.state())
    hear(heard, peer.bye())
    assert load(pools) == ([0, 0], [0, 0])
    assert heard.names == ()
    assert heard.counts.silent == 0
    assert [r.getMessage().split()[-1] for r in caplog.records] == ["there", "ends"]


def test_a_silent_replica_leaves_after_a_while_and_comes_back_whole(pools, heard, peer, caplog):
    waits, runs = (peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 60.0) for _ in range(2))
    peer.first_token(runs)
    hear(heard, peer.state(), 0.0)
    heard.look(SILENCE_S)
    assert load(pools) == ([2, 0], [1, 0])
    heard.look(SILENCE_S + 0.1)
    assert load(pools) == ([0, 0], [0, 0])
    assert expected(pools, 4.0) == [8, 0]  # its requests may well have arrived
    assert heard.counts.silent == 1
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "is silent and given up, with 2 requests" in told
    hear(heard, peer.state(), 10.0)
    assert load(pools) == ([2, 0], [1, 0])
    peer.free(waits, True)
    peer.free(runs, True)
    hear(heard, peer.news(), 10.1)
    assert load(pools) == ([0, 0], [0, 0])


def test_a_restarted_replica_is_another_and_its_old_requests_leave(pools, heard, peer):
    peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    hear(heard, peer.state(), 0.0)
    again = Outbox(Sender("peer", "run-2", "key"))
    again.reserve(("p", "w1", 0), 0.5, True, BLOCKS, 4.0)  # the same number of flight
    hear(heard, again.state(), 2.0)
    assert load(pools) == ([1, 1], [0, 0])
    heard.look(4.0)
    assert load(pools) == ([0, 1], [0, 0])
    assert heard.names == ("peer",)


def test_a_replica_heard_late_is_known_whole_by_its_state(pools, heard, peer):
    flight = peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    peer.news()
    peer.first_token(flight)
    hear(heard, peer.news())
    assert heard.counts.unknown_flights == 1
    hear(heard, peer.state())
    assert load(pools) == ([1, 0], [1, 0])
    assert heard.counts.gaps == 0  # what came before the first word is no gap


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "first", "free", "news", "state"]), st.integers(0, 30), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_lost_messages_leave_nothing_behind(steps):
    pools = make_pools()
    heard, box, live = Heard(pools, "own", "key", SILENCE_S), Outbox(Sender("peer", "run", "key")), {}
    for kind, number, flag, lost in steps:
        message = None
        if kind == "reserve":
            live[box.reserve(("p", f"w{number % 2}", 0), 0.1, flag, BLOCKS[: number % 9], 1.0)] = number % 2
        elif kind in ("first", "free") and live:
            flight = list(live)[number % len(live)]
            if kind == "first":
                box.first_token(flight)
            else:
                box.free(flight, flag)
                del live[flight]
        elif kind == "news":
            message = box.news()
        elif kind == "state":
            message = box.state()
        if message is not None and not lost:
            hear(heard, message)
            if message.flights is not None:
                assert load(pools)[0] == [list(live.values()).count(w) for w in (0, 1)]
    hear(heard, box.state())
    assert load(pools)[0] == [list(live.values()).count(w) for w in (0, 1)]
    for flight in list(live):
        box.free(flight, True)
    hear(heard, box.state())
    assert load(pools) == ([0, 0], [0, 0])
    assert pools.by_name["p"].load.queue_s(1.0).tolist() == [0, 0]
    assert heard.flights == 0


def test_what_comes_again_by_another_address_of_its_sender_counts_once(pools, heard, peer):
    flight = peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    reserved = peer.news()
    peer.free(flight, False)
    for message in (reserved, freed := peer.news(), reserved, freed, reserved):
        hear(heard, message)
    assert load(pools) == ([0, 0], [0, 0])
    assert expected(pools) == [0, 0]
    assert (heard.counts.messages, heard.counts.again, heard.counts.unknown_flights) == (2, 3, 0)


def test_missing_messages_are_counted(heard, peer):
    for sent in (True, False, False, True):
        message = peer.state()
        if sent:
            hear(heard, message)
    assert heard.counts.gaps == 2


def test_a_worker_that_we_do_not_have_is_booked_once_we_do(pools, heard, peer):
    flight = peer.reserve(("p", "w2", 0), 0.5, True, BLOCKS, 60.0)
    peer.reserve(("q", "w0", 0), 0.5, True, BLOCKS, 60.0)
    hear(heard, peer.state())
    assert heard.counts.unknown_targets >= 2
    assert heard.flights == 0
    pools.by_name["p"].set_workers(fleet(("w0", "w1", "w2")).workers, 0.0)
    hear(heard, peer.state())
    assert load(pools)[0] == [0, 0, 1]
    peer.free(flight, True)
    hear(heard, peer.news())
    assert load(pools)[0] == [0, 0, 0]


def test_a_worker_that_is_gone_keeps_its_number_until_their_requests_there_have_ended(pools, heard, peer):
    flight = peer.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 60.0)
    hear(heard, peer.state())
    pool = pools.by_name["p"]
    pool.set_workers(fleet(("w1", "w9")).workers, 0.0)
    assert load(pools)[0][0] == 1
    assert pool.targets[0].worker == "w0"
    peer.free(flight, True)
    hear(heard, peer.news())
    pool.set_workers(fleet(("w1", "w9", "w8")).workers, 0.0)
    assert pool.targets[0].worker == "w8"
    assert load(pools)[0] == [0, 0, 0]


def test_blocks_of_another_hash_key_are_left_out(pools, heard):
    other = Outbox(Sender("peer", "run-1", "other"))
    other.reserve(("p", "w0", 0), 0.5, True, BLOCKS, 4.0)
    hear(heard, other.state())
    assert load(pools)[0] == [1, 0]
    assert expected(pools) == [0, 0]
    assert heard.counts.other_key == 1


def test_so_many_replicas_and_no_more(heard):
    for i in range(MAX_REPLICAS + 3):
        hear(heard, Message("peer", f"run-{i}", 1, "key", (), ()))
    assert len(heard.names) == MAX_REPLICAS
    assert heard.counts.refused == 3
