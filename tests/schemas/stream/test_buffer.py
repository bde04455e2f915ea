"""The shared writer's own promises, against a delivery that fails on command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from schemas.stream import StreamError, StreamUnavailable
from schemas.stream.buffer import BufferedWriter, Pending, Refused


class Delivery:
    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.fail_with: list[Exception] = []
        self.refuse: set[bytes] = set()
        self.away = threading.Event()
        self.closed = False

    def check(self, topic: str, size_bytes: int) -> None: ...

    def deliver(self, batch: Sequence[Pending], report: Callable[[StreamError | None], None], give_up: threading.Event) -> Refused:
        if self.away.is_set():
            raise StreamUnavailable("away by the test")
        if self.fail_with:
            raise self.fail_with.pop()
        self.stored += [record[2] for record in batch if record[2] not in self.refuse]
        return [(record, StreamError("refused")) for record in batch if record[2] in self.refuse]

    def tend(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def _writer(delivery: Delivery, failures: list[tuple[bytes, str]] | None = None) -> BufferedWriter:
    def on_failure(topic: str, key: bytes, value: bytes, error: StreamError) -> None:
        assert failures is not None
        failures.append((value, str(error)))

    return BufferedWriter(
        delivery,
        name="test",
        on_failure=None if failures is None else on_failure,
        max_buffer_bytes=1_000_000,
        linger_s=0.001,
    )


def test_an_outage_is_ridden_out_in_order() -> None:
    delivery = Delivery()
    delivery.away.set()
    writer = _writer(delivery)
    for i in range(500):
        writer.append("t", b"k", b"%d" % i)
    with pytest.raises(StreamUnavailable, match=r"500 records .* away by the test"):
        writer.flush(0.2)
    assert isinstance(writer.trouble, StreamUnavailable) and writer.pending() == 500
    delivery.away.clear()
    writer.flush(10)
    assert delivery.stored == [b"%d" % i for i in range(500)]
    assert writer.trouble is None and writer.pending() == 0
    writer.close(1)
    assert delivery.closed


def test_close_gives_up_after_its_time_and_hands_over_every_record() -> None:
    delivery, failures = Delivery(), list[tuple[bytes, str]]()
    delivery.away.set()
    writer = _writer(delivery, failures)
    for i in range(6000):  # more than a batch
        writer.append("t", b"k", b"%d" % i, timestamp_ms=1)
        if i % 1000 == 0:
            time.sleep(0)
        if writer.pending() * 300 > 900_000:
            break
    taken = writer.pending()
    began = time.monotonic()
    writer.close(0.1)
    assert time.monotonic() - began < 3
    assert [value for value, _ in failures] == [b"%d" % i for i in range(taken)]
    assert (writer.failed, writer.delivered, writer.pending()) == (taken, 0, 0)
    writer.close(0.1)


def test_close_does_not_try_each_waiting_batch_once_more() -> None:
    """Each try may take seconds: a lock that is waited for, a broker that does not answer."""
    delivery, failures, tries = Delivery(), list[tuple[bytes, str]](), 0

    def deliver(batch: Sequence[Pending], report: object, give_up: threading.Event) -> Refused:
        nonlocal tries
        tries += 1
        give_up.wait(20)
        raise StreamUnavailable("away by the test")

    delivery.deliver = deliver  # type: ignore[method-assign]
    writer = BufferedWriter(
        delivery, name="t", on_failure=lambda t, k, value, e: failures.append((value, str(e))), max_buffer_bytes=10**8, linger_s=0
    )
    for i in range(20_000):
        writer.append("t", b"k", b"%d" % i)
    writer.close(0.1)
    assert tries == 1
    assert [value for value, _ in failures] == [b"%d" % i for i in range(20_000)]
    assert (writer.failed, writer.pending()) == (20_000, 0)


def test_refused_records_are_counted_and_the_others_delivered() -> None:
    delivery, failures = Delivery(), list[tuple[bytes, str]]()
    delivery.refuse = {b"bad"}
    writer = _writer(delivery, failures)
    for value in (b"a", b"bad", b"b"):
        writer.append("t", b"k", value)
    writer.flush(5)
    assert delivery.stored == [b"a", b"b"] and failures == [(b"bad", "refused")]
    assert (writer.delivered, writer.failed) == (2, 1)
    writer.close(1)


def test_a_batch_that_breaks_the_backend_does_not_stop_the_next() -> None:
    delivery, failures = Delivery(), list[tuple[bytes, str]]()
    delivery.fail_with = [ZeroDivisionError("poison")]
    writer = _writer(delivery, failures)
    writer.append("t", b"k", b"poison")
    writer.flush(5)
    writer.append("t", b"k", b"fine")
    writer.flush(5)
    assert delivery.stored == [b"fine"]
    assert failures[0][0] == b"poison" and "ZeroDivisionError" in failures[0][1]
    writer.close(1)


def test_a_callback_that_raises_does_not_end_the_writer() -> None:
    delivery = Delivery()
    delivery.refuse = {b"bad"}

    def on_failure(*_: object) -> None:
        raise RuntimeError("callback")

    writer = BufferedWriter(delivery, name="t", on_failure=on_failure, max_buffer_bytes=10_000, linger_s=0)
    writer.append("t", b"k", b"bad")
    writer.flush(5)
    writer.append("t", b"k", b"good")
    writer.flush(5)
    assert delivery.stored == [b"good"] and writer.failed == 1
    writer.close(1)
