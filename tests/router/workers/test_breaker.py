"""One process's breaker, with a clock of the test's own."""

import random

import pytest

from router.workers.breaker import FAILURES, STATES, Breaker, BreakerRules, Circuit

RULES = BreakerRules()


def breaker(**rules):
    return Breaker(BreakerRules(**rules), random.Random(1))


def opened(now_s=0.0):
    b = breaker()
    b.broke(now_s)
    b.broke(now_s)
    assert not b.allows(now_s)
    return b


def test_one_broken_connection_is_forgiven_and_two_in_a_row_are_not():
    b = breaker()
    b.broke(0.0)
    b.answered(0.0)
    b.broke(0.0)
    assert b.allows(0.0)
    b.broke(0.0)
    assert (b.allows(0.0), b.state(0.0)) == (False, "open")


def test_when_its_time_is_over_one_request_is_a_trial_and_its_answer_closes_it():
    b = opened()
    assert not b.allows(0.49)
    assert (b.allows(1.0), b.circuit) == (True, Circuit.HALF_OPEN)
    b.sent(1.0)
    assert not b.allows(1.5)
    b.answered(1.6)
    assert (b.allows(1.6), b.state(1.6), b.pristine(1.6)) == (True, "up", True)


def test_a_trial_of_which_nothing_is_heard_is_followed_by_another_later_and_later():
    b, now_s, trials = opened(), 0.0, 0
    while now_s < 600.0:  # as long as a request may wait for its first byte
        now_s += 0.1
        if b.allows(now_s):
            b.sent(now_s)
            trials += 1
    assert 600 / 30 <= trials <= 6 + 600 / 15
    b.answered(now_s)
    assert b.pristine(now_s)


def test_each_failed_trial_doubles_its_time_up_to_the_longest():
    b, now_s, lasted = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not b.allows(now_s):
            now_s += 0.01
        lasted.append(now_s - began_s)
        b.sent(now_s)
        b.broke(now_s)
    bounds = [min(30.0, 2.0**n) for n in range(8)]
    assert all(0.5 * most - 0.02 <= s <= most + 0.02 for s, most in zip(lasted, bounds, strict=True))
    assert len({round(s / most, 2) for s, most in zip(lasted, bounds, strict=True)}) > 3  # jitter


def test_after_a_long_good_time_it_opens_shortly_again():
    b = opened()
    b.allows(2.0)
    b.sent(2.0)
    b.broke(2.0)
    b.allows(9.0)
    b.sent(9.0)
    b.answered(9.0)
    b.broke(100.0)
    b.broke(100.0)
    assert b.allows(101.0)


def test_an_answer_from_before_does_not_close_it_but_one_that_was_sent_since_does():
    b = opened()
    b.answered(0.1)
    assert b.state(0.1) == "open"
    b.sent(0.2)  # nobody else was left
    b.answered(0.3)
    assert b.state(0.3) == "up"


@pytest.mark.parametrize("seconds", [0.1, 60.0])
def test_five_failing_statuses_in_a_row_open_it_at_any_pace(seconds):
    b = breaker()
    for n in range(5):
        assert b.allows(n * seconds)
        b.failed(n * seconds)
    assert b.state(4 * seconds) == "open"


def test_a_window_that_mostly_fails_opens_it_and_one_that_mostly_answers_does_not():
    fails, works = breaker(), breaker()
    for n in range(60):
        for b, bad in ((fails, n % 3 > 0), (works, n % 3 == 0)):
            (b.failed if bad else b.answered)(n * 0.05)
    assert (fails.state(3.0), works.state(3.0)) == ("open", "up")


def test_a_statuses_row_is_no_row_of_broken_connections():
    b = breaker()
    for _ in range(4):
        b.broke(0.0)
        b.failed(0.0)
    assert b.allows(0.0)


def test_a_refused_connection_shuts_it_out_until_its_health_answers():
    b = breaker()
    b.refused(0.0)
    assert (b.allows(1000.0), b.state(1000.0)) == (False, "unreachable")
    b.health_answered(1000.0)
    assert b.allows(1000.0)


def test_health_that_comes_back_ends_the_time_at_once():
    b = opened()
    for _ in range(6):
        b.allows(100.0)
        b.broke(100.0)
    b.refused(100.0)
    b.health_answered(100.1)
    assert (b.allows(100.1), b.state(100.1)) == (True, "half_open")


def test_health_that_never_failed_does_not_let_a_hung_worker_in():
    b = opened()
    b.health_answered(0.1)
    assert not b.allows(0.1)


def test_three_failed_health_checks_in_a_row_shut_it_out_and_one_that_answers_lets_it_in():
    b = breaker()
    for n in range(3):
        assert b.allows(float(n))
        b.health_failed(float(n), float(n), silent=False)
    assert not b.allows(3.0)
    b.answered(3.0)  # a request that was on its way: it does what it says, which is to send it no more
    assert not b.allows(3.0)
    b.health_answered(4.0)
    assert b.allows(4.0)


def test_a_slow_worker_is_not_a_dead_one():
    b = breaker()
    for n in range(50):
        b.answered(n + 0.5)
        b.health_failed(n + 1.0, asked_s=n + 0.0, silent=True)
    assert b.allows(50.0)
    for n in range(50, 53):
        b.health_failed(n + 1.0, asked_s=n + 0.0, silent=True)
    assert not b.allows(53.0)


def test_a_worker_that_asks_for_time_gets_it_within_bounds_and_nothing_is_held_against_it():
    b = breaker()
    for _ in range(20):
        b.asked_to_wait(2.0, 0.0)
    assert (b.allows(1.9), b.state(1.9), b.allows(2.0), b.pristine(2.0)) == (False, "backing_off", True, True)
    b.asked_to_wait(9999.0, 10.0)
    assert b.allows(10.0 + RULES.longest_back_off_s)


class Twin:
    """The same rules, as a list of all that happened, looked through at each question; for in-a-row rules and reachability."""

    def __init__(self):
        self.log = []

    def tell(self, what):
        self.log.append(what)

    def reachable(self):
        refused, failed = False, 0
        for what in self.log:
            if what == "refused":
                refused = True
            elif what == "health_answered":
                refused, failed = False, 0
            elif what == "health_failed":
                failed += 1
            elif what == "answered" and failed < 3:
                refused = False
            if failed >= 3:
                refused = True
        return not refused


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_the_rules_hold(seed):
    rng, now_s, twin = random.Random(seed), 0.0, Twin()
    b = Breaker(RULES, random.Random(seed))
    allowed_edges = {
        (Circuit.CLOSED, Circuit.OPEN), (Circuit.OPEN, Circuit.HALF_OPEN), (Circuit.HALF_OPEN, Circuit.OPEN),
        (Circuit.HALF_OPEN, Circuit.CLOSED), (Circuit.OPEN, Circuit.CLOSED),
    }  # fmt: skip
    trouble_s = 0.0
    for _ in range(1000):
        now_s += rng.random() * rng.choice((0.01, 0.3, 3))
        before = b.circuit
        what = rng.choice(("sent", "answered", "answered", "refused", "broke", "failed", "health_answered", "health_failed", "allows"))
        if what == "health_failed":
            b.health_failed(now_s, now_s, silent=False)
        else:
            getattr(b, what)(now_s)
        twin.tell(what)
        if what in ("refused", "broke", "failed", "sent", "health_failed"):
            trouble_s = now_s
        assert b.circuit is before or (before, b.circuit) in allowed_edges
        assert b.reachable == twin.reachable()
        assert b.state(now_s) in STATES
        if b.pristine(now_s):
            assert b.allows(now_s)
        if rng.random() < 0.02:  # left alone, with its health answering, it is let in again within the longest time
            b.health_answered(now_s)
            twin.tell("health_answered")
            now_s = trouble_s = max(now_s, trouble_s + RULES.longest_open_s)
            assert b.allows(now_s)
            b.sent(now_s)
            b.answered(now_s)
            twin.tell("answered")
            assert b.pristine(now_s)


def test_the_statuses_that_count_are_those_of_a_server_that_fails():
    assert sorted(FAILURES) == [500, 502, 503, 504]
