import time

from router.records.recorder import Recorder
from schemas.requests import Outcome
from schemas.stream.memory import MemoryHub
from schemas.topics import OUTCOMES, topic_specs


def outcome(i):
    return f"r{i}", Outcome(request_id=f"r{i}", time_s=1.0, status=200).model_dump_json().encode()


def written(hub, as_they_came=False):
    with hub.open("s") as stream:
        reader = stream.reader()
        reader.assign({(OUTCOMES, p): 0 for p in range(stream.partitions(OUTCOMES))})
        out = [Outcome.model_validate_json(r.value) for _ in range(8) for s in reader.poll(0.0, 10_000) for r in s.records]
        reader.close()
    found = [o.request_id for o in out]
    return found if as_they_came else sorted(found)


def test_records_wait_for_the_stream_within_the_bound_and_the_rest_is_counted():
    hub = MemoryHub()
    hub.outage("s", "away")
    with hub.open("s") as stream:
        recorder = Recorder(stream, topic_specs(), "", capacity=10)
        recorder.start()
        started_s = time.monotonic()
        for i in range(15):
            recorder.outcome(*outcome(i))
        assert time.monotonic() - started_s < 1.0
        assert (recorder.waiting, recorder.dropped) == (10, 5)
        assert recorder.trouble
        hub.heal("s")
        deadline_s = time.monotonic() + 5
        while recorder.recorded < 10 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        recorder.close(5.0)
    assert written(hub) == sorted(f"r{i}" for i in range(10))
    assert recorder.dropped == 5


def test_closing_delivers_what_waits():
    hub = MemoryHub()
    with hub.open("s") as stream:
        recorder = Recorder(stream, topic_specs(), "", capacity=1000)
        recorder.start()
        for i in range(500):
            recorder.outcome(*outcome(i))
        recorder.close(5.0)
        assert (recorder.waiting, recorder.dropped, recorder.recorded) == (0, 0, 500)
    assert len(written(hub)) == 500


def test_what_waited_is_handed_over_in_order_and_new_records_follow_it():
    hub = MemoryHub()
    hub.outage("s", "away")
    with hub.open("s") as stream:
        recorder = Recorder(stream, topic_specs(), "", capacity=10_000)
        recorder.start()
        for i in range(3000):
            recorder.outcome("one-key", outcome(i)[1])
        hub.heal("s")
        i = 3000
        deadline_s = time.monotonic() + 10
        while recorder.recorded < 3000 and time.monotonic() < deadline_s:  # some come while the others are handed over
            recorder.outcome("one-key", outcome(i)[1])
            i += 1
            time.sleep(0.0005)
        recorder.close(5.0)
        assert (recorder.dropped, recorder.recorded) == (0, i)
    assert written(hub, as_they_came=True) == [f"r{n}" for n in range(i)]


def test_an_error_nobody_foresaw_does_not_end_the_recorder(monkeypatch):
    hub = MemoryHub()
    with hub.open("s") as stream:
        recorder = Recorder(stream, topic_specs(), "", capacity=10)
        ensure = stream.ensure_topics

        def broken_once(specs):
            monkeypatch.setattr(stream, "ensure_topics", ensure)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(stream, "ensure_topics", broken_once)
        recorder.start()
        recorder.outcome(*outcome(1))
        deadline_s = time.monotonic() + 5
        while recorder.recorded < 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        recorder.close(5.0)
    assert written(hub) == ["r1"]


def test_closing_while_the_stream_is_away_ends_in_time_and_counts_the_loss():
    hub = MemoryHub()
    hub.outage("s", "away")
    with hub.open("s") as stream:
        recorder = Recorder(stream, topic_specs(), "", capacity=10)
        recorder.start()
        recorder.outcome(*outcome(1))
        started_s = time.monotonic()
        recorder.close(0.2)
        assert time.monotonic() - started_s < 3
        recorder.outcome(*outcome(2))
        assert recorder.dropped == 2
