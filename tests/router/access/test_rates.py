"""Token buckets against a naive twin that sums up the whole past in exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.access.rates import Account, Limits, rate_headers


class Twin:
    """One bucket by its definition: what came back since each payment never exceeds the capacity."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self.paid: list[tuple[Fraction, int]] = []

    def balance(self, now: Fraction) -> Fraction:
        have, at = Fraction(self.per_minute), Fraction(0)
        for when, amount in self.paid:
            have = min(Fraction(self.per_minute), have + (when - at) * self.per_minute / 60) - amount
            at = when
        return min(Fraction(self.per_minute), have + (now - at) * self.per_minute / 60)


STEPS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90), st.booleans()), max_size=60)


@settings(max_examples=150, deadline=None)
@given(rpm=st.integers(1, 30), tpm=st.integers(1, 200), most=st.integers(1, 4), steps=STEPS)
def test_an_account_does_as_its_twin(rpm, tpm, most, steps):
    # eighths of a second and limits times 60 keep every sum exact in a float
    limits = Limits(rpm * 60, tpm * 60, most)
    account, requests, tokens, inside = Account(), Twin(rpm * 60), Twin(tpm * 60), 0
    now = Fraction(0)
    for eighths, size, leaves in steps:
        now += Fraction(eighths, 8)
        if leaves and inside:
            account.leave()
            inside -= 1
        denied = account.admit(limits, float(now))
        owed, saved = tokens.balance(now), requests.balance(now)
        expected = "in_flight" if inside >= most else "requests" if saved < 1 else "tokens" if owed <= 0 else None
        assert (None if denied is None else denied.what) == expected
        if denied is None:
            requests.paid.append((now, 1))
            inside += 1
            assert account.spend(limits, size * 60, float(now)) is None
            tokens.paid.append((now, size * 60))
        else:
            assert denied.retry_after_s > 0
        assert account.in_flight == inside
        assert account.left(limits, float(now)) == (requests.balance(now), tokens.balance(now))


def test_retry_after_is_when_it_can_pay():
    limits = Limits(requests_per_minute=2)
    account = Account()
    assert account.admit(limits, 0.0) is None
    assert account.admit(limits, 0.0) is None
    denied = account.admit(limits, 10.0)
    assert denied.what == "requests"
    assert denied.retry_after_s == pytest.approx(20.0)
    assert account.admit(limits, 10.0 + denied.retry_after_s) is None


def test_a_prompt_longer_than_a_minutes_worth_gets_in_and_is_paid_for_by_waiting():
    limits = Limits(tokens_per_minute=600)
    account = Account()
    assert account.admit(limits, 0.0) is None
    assert account.spend(limits, 1200, 0.0) is None
    assert account.admit(limits, 30.0).what == "tokens"
    assert account.admit(limits, 30.0).retry_after_s == pytest.approx(30.0)
    assert account.admit(limits, 61.0) is None


def test_of_two_that_were_let_in_at_once_the_second_does_not_overdraw_again():
    limits = Limits(tokens_per_minute=600)
    account = Account()
    assert account.admit(limits, 0.0) is None
    assert account.admit(limits, 0.0) is None
    assert account.spend(limits, 700, 0.0) is None
    assert account.spend(limits, 700, 0.0).what == "tokens"


def test_who_is_denied_has_paid_nothing():
    limits = Limits(requests_per_minute=10, tokens_per_minute=60, max_in_flight=1)
    account = Account()
    assert account.admit(limits, 0.0) is None
    assert account.admit(limits, 0.0).what == "in_flight"
    assert account.left(limits, 0.0) == (9, 60)
    account.spend(limits, 100, 0.0)
    account.leave()
    assert account.admit(limits, 0.0).what == "tokens"
    assert account.left(limits, 0.0) == (9, -40)
    assert account.in_flight == 0


def test_a_clock_that_steps_back_gives_nothing():
    limits = Limits(requests_per_minute=60)
    account = Account()
    assert account.admit(limits, 100.0) is None
    assert account.left(limits, 90.0) == (59, None)
    assert account.left(limits, 100.5) == (59.5, None)


def test_limits_may_change_between_two_requests():
    account = Account()
    assert account.admit(Limits(requests_per_minute=60), 0.0) is None
    assert account.left(Limits(requests_per_minute=6), 0.0) == (6, None)
    assert account.admit(Limits(), 0.0) is None


def test_headers_are_those_that_clients_of_openai_know():
    limits = Limits(requests_per_minute=60, tokens_per_minute=600)
    account = Account()
    account.admit(limits, 0.0)
    account.spend(limits, 1000, 0.0)
    assert dict(rate_headers(account, limits, 0.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"100.000s",
    }
    assert rate_headers(Account(), Limits(), 0.0) == []
