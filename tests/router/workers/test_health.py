"""A pool's breakers as an array, and what is told of them."""

import logging

import numpy as np
import pytest

from router.workers.health import Health, retry_after_s
from tests.router.workers.test_targets import targets


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def health(*ranks):
    clock = Clock()
    return Health(targets(*ranks), clock=clock), clock


def test_a_refused_connection_takes_all_ranks_of_the_worker_down():
    h, _ = health(1, 2)
    h.refused(1)
    assert h.up.tolist() == [True, False, False]
    assert h.down_urls() == {"http://h1:1"}
    h.answered(2)
    assert h.up.all()


def test_one_broken_connection_is_forgiven():
    h, _ = health(1, 1)
    h.broke(0)
    h.answered(0)
    h.broke(0)
    assert h.up.all()
    h.broke(0)
    assert h.up.tolist() == [False, True]


def test_time_alone_lets_one_trial_through_and_its_answer_lets_all_in():
    h, clock = health(1, 1)
    h.broke(0)
    h.broke(0)
    clock.now_s = 2.0
    assert h.up_at(2.0).all()
    h.sent(0)
    assert h.up.tolist() == [False, True]
    h.answered(0)
    assert (h.up.all(), h.down_urls(), h.state(0, 2.0)) == (True, set(), "up")


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 429, 499])
def test_a_4xx_never_counts(status):
    h, _ = health(1)
    for _ in range(100):
        h.failed(0, status)
    assert (h.up.all(), dict(h.changes)) == (True, {})


def test_five_500s_count_and_the_same_with_retry_after_is_obeyed_instead():
    h, clock = health(1, 1)
    for _ in range(5):
        h.failed(0, 500, retry_after_s=1)
        h.failed(1, 503, retry_after_s=1)
    assert (h.up.tolist(), h.state(0, 0.0), h.state(1, 0.0)) == ([False, False], "open", "backing_off")
    clock.now_s = 1.0
    assert h.up_at(1.0)[1]


def test_a_change_is_logged_once_and_counted(caplog):
    h, clock = health(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            h.refused(0)
        clock.now_s = 50.0
        h.health_answered("http://h0:1")
        h.sent(0)
        h.answered(0)
    assert [r.message.split(": ")[0] for r in caplog.records] == [
        "worker w0 (http://h0:1) is unreachable, no longer up",
        "worker w0 (http://h0:1) is half_open, no longer unreachable",
        "worker w0 (http://h0:1) is up, no longer half_open",
    ]
    assert h.changes == {("w0", "unreachable"): 1, ("w0", "half_open"): 1, ("w0", "up"): 1}


def test_members_that_change_keep_what_is_known_of_those_who_stay():
    h, _ = health(1, 1, 1)
    h.refused(1)
    more = targets(1, 1, 1, 1)
    h.set_targets(more, present=np.array([True, True, False, True]))
    assert h.up.tolist() == [True, False, False, True]
    assert h.urls() == ("http://h0:1", "http://h1:1", "http://h3:1")
    h.answered(2)  # gone: its last request is answered
    h.broke(2)
    h.broke(2)
    h.refused(2)
    assert (h.up.tolist(), h.down_urls()) == ([True, False, False, True], {"http://h1:1"})
    h.set_targets(more, present=np.array([True, False, False, True]))
    assert (h.up.tolist(), h.down_urls()) == ([True, False, False, True], set())


def test_a_worker_that_left_while_it_failed_is_not_up_when_it_comes_back(caplog):
    h, _ = health(1, 1)
    forgotten = []
    h.went_down = forgotten.extend
    h.refused(0)
    for here in (False, True):
        h.set_targets(targets(1, 1), present=np.array([here, True]))
    assert (h.up.tolist(), h.down_urls(), forgotten) == ([False, True], {"http://h0:1"}, [0, 0])
    assert caplog.records[-1].message == "worker w0 (http://h0:1) is unreachable, no longer up: as when it left"
    h.health_answered("http://h0:1")
    assert h.up.all()


def test_what_is_said_of_a_stranger_is_nothing():
    h, _ = health(1)
    h.health_answered("http://gone:1")
    h.health_failed("http://gone:1", 0.0, False, "x")
    assert h.up.all()


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("0", 0.0), (None, None), ("soon", None), ("-1", None), ("٣", None)])
def test_retry_after_is_read_as_seconds_or_not_at_all(value, seconds):
    assert retry_after_s(value) == seconds
