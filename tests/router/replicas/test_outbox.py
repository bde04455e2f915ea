import numpy as np

from router.replicas.messages import MAX_BLOCKS, MAX_BYTES, FirstToken, Freed, Reserved, Underway, encode
from router.replicas.outbox import Outbox, Sender

PLACE = ("pool", "worker", 0)
BLOCKS = np.arange(3, dtype=np.uint64)


def outbox():
    return Outbox(Sender("r", "run", "key"))


def test_news_are_told_once_in_order_and_numbered():
    box = outbox()
    assert box.news() is None
    a = box.reserve(PLACE, 0.5, True, BLOCKS, 3.0)
    b = box.reserve(PLACE, 0.25, False, BLOCKS[:0], 1.0)
    box.first_token(a)
    box.first_token(a)
    first = box.news()
    assert [type(e) for e in first.events] == [Reserved, Reserved, FirstToken]
    assert first.flights is None
    box.free(a, True)
    box.free(a, False)
    box.first_token(a)
    box.free(b, False)
    second = box.news()
    assert second.events == (Freed(a, True), Freed(b, False))
    assert second.seq == first.seq + 1
    assert box.news() is None
    assert box.flights == 0


def test_the_state_names_what_is_on_its_way_after_its_events():
    box = outbox()
    gone, stays, waits = (box.reserve(PLACE, 0.5, True, BLOCKS, 3.0) for _ in range(3))
    box.first_token(stays)
    box.free(gone, True)
    state = box.state()
    assert len(state.events) == 5
    assert state.flights == (Underway(stays, PLACE, 0.5, True, False), Underway(waits, PLACE, 0.5, True, True))
    assert box.state().events == ()
    assert box.state().flights == state.flights


def test_a_message_stays_within_what_may_be_sent():
    box = outbox()
    many = np.zeros(10_000, np.uint64)
    told = 0
    while not box.is_full:
        box.reserve(PLACE, 0.5, True, many, 3.0)
        told += 1
    for _ in range(1000):
        box.reserve(PLACE, 0.5, True, many, 3.0)
    news = box.news()
    assert len(news.events) == told + 1000
    assert max(len(e.blocks) for e in news.events) == MAX_BLOCKS
    assert sum(map(len, encode(news))) < MAX_BYTES
    assert not box.is_full


def test_events_beyond_the_bound_are_counted():
    box = outbox()
    for _ in range(10_001):
        box.reserve(PLACE, 0.5, True, BLOCKS[:0], 3.0)
    assert box.dropped == 1
    assert len(box.state().events) == 10_000


def test_the_farewell_says_that_it_is_one():
    box = outbox()
    box.reserve(PLACE, 0.5, True, BLOCKS, 3.0)
    assert box.bye().bye
