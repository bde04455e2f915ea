"""The binary KV batch: what is encoded is decoded, one by one and many at once; broken bytes are refused with the rule they break."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.kv_events import EVENT, BadBatch, Kind, KvBatch, Tier, WorkerId, decode, encode, unpack

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def batches(draw):
    counts = draw(st.lists(st.integers(0, 5), max_size=6))
    events = np.zeros(len(counts), EVENT)
    events["count"] = counts
    for event in events:
        event["kind"] = draw(st.sampled_from(Kind))
        event["tier"] = draw(st.sampled_from(Tier))
        event["group"] = draw(st.integers(0, 65535))
        event["seq"], event["parent"] = draw(u64), draw(u64)
        event["time_s"] = draw(st.floats(allow_nan=False))
        event["block_size"], event["flags"] = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 15))
    hashes = np.array(draw(st.lists(u64, min_size=sum(counts), max_size=sum(counts))), np.uint64)
    source = WorkerId(draw(names), draw(names), draw(st.integers(0, 65535)))
    engine_time_s = draw(st.none() | st.floats(allow_nan=False))
    return KvBatch(source, draw(u64), draw(u64), draw(u64), engine_time_s, draw(st.floats(allow_nan=False)), events, hashes)


def same(a: KvBatch, b: KvBatch) -> bool:
    head = ("source", "epoch", "first_seq", "last_seq", "engine_time_s", "bridge_time_s")
    return (
        all(getattr(a, f) == getattr(b, f) for f in head)
        and a.events.tolist() == b.events.tolist()
        and a.hashes.tolist() == b.hashes.tolist()
    )


def example(blocks: int = 3) -> KvBatch:
    events = np.zeros(1, EVENT)
    events["kind"], events["count"], events["seq"] = Kind.STORED, blocks, 9
    return KvBatch(WorkerId("pool", "w0", 1), 5, 9, 9, 1.5, 2.5, events, np.arange(blocks, dtype=np.uint64))


@given(batches())
def test_a_batch_survives_encoding(batch):
    record = encode(batch)
    assert len(record) % 8 == 0
    assert same(decode(record), batch)


@given(st.lists(batches(), max_size=8))
@settings(max_examples=50)
def test_many_at_once_equal_one_by_one(many):
    records = [encode(b) for b in many]
    whole = unpack(records)
    assert whole.ok.all()
    event_at = hash_at = 0
    for i, batch in enumerate(many):
        assert whole.worker_number[i] == batch.source.number
        assert [whole.epoch[i], whole.first_seq[i], whole.last_seq[i]] == [batch.epoch, batch.first_seq, batch.last_seq]
        assert whole.events[event_at : whole.event_end[i]].tolist() == batch.events.tolist()
        assert whole.hashes[hash_at : whole.hash_end[i]].tolist() == batch.hashes.tolist()
        event_at, hash_at = int(whole.event_end[i]), int(whole.hash_end[i])
    assert (event_at, hash_at) == (len(whole.events), len(whole.hashes))


def test_a_broken_record_costs_only_itself():
    good = encode(example())
    broken = [b"", b"x", good[:-8], good + bytes(8), b"NOPE" + good[4:], good[:4] + b"\x02\x00" + good[6:], bytes(200)]
    whole = unpack([good, *broken, good])
    assert whole.ok.tolist() == [True, *[False] * len(broken), True]
    assert len(whole.events) == 2
    assert whole.hashes.tolist() == [0, 1, 2, 0, 1, 2]
    for record in broken:
        with pytest.raises(BadBatch):
            decode(record)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: r[:-1], "no multiple of 8"),
        (lambda r: b"NOPE" + r[4:], "does not start with WWKV"),
        (lambda r: r[:4] + struct.pack("<H", 7) + r[6:], "version 7 is unknown"),
        (lambda r: r + bytes(8), "do not hold"),
        (lambda r: r[:8] + bytes(8) + r[16:], "worker id does not belong to pool/w0/1"),
        (lambda r: r.replace(b"poolw0", b"\xff\xfeolw0"), "not UTF-8"),
        (lambda r: r[:80] + struct.pack("<BBHI", 1, 0, 0, 2) + r[88:], "events count 2 hashes, the record holds 3"),
        (lambda r: r[:80] + struct.pack("<BBHI", 99, 0, 0, 3) + r[88:], "event kind 99"),
    ],
)
def test_a_refusal_names_the_rule(change, rule):
    with pytest.raises(BadBatch, match=rule):
        decode(change(encode(example())))


def test_random_damage_never_escapes_as_another_error():
    rng = random.Random(7)
    good = encode(example(40))
    for _ in range(3000):
        record = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            record[rng.randrange(len(record))] = rng.randrange(256)
        record = bytes(record[: rng.choice([len(record), rng.randrange(len(record))])])
        whole = unpack([record, good])
        assert whole.ok[1]
        try:
            decode(record)
        except BadBatch:
            continue
        assert whole.ok[0]


def test_names_and_counts_are_checked_when_packing():
    batch = example()
    with pytest.raises(BadBatch, match="1 to 1024 bytes"):
        encode(KvBatch(WorkerId("", "w", 0), 0, 0, 0, None, 0.0, batch.events, batch.hashes))
    with pytest.raises(BadBatch, match="the batch holds 2"):
        encode(KvBatch(batch.source, 0, 0, 0, None, 0.0, batch.events, batch.hashes[:2]))


def test_iterating_a_batch_gives_each_event_its_own_hashes():
    events = np.zeros(3, EVENT)
    events["count"] = 2, 0, 1
    batch = KvBatch(WorkerId("p", "w", 0), 0, 0, 0, None, 0.0, events, np.array([4, 5, 6], np.uint64))
    assert [h.tolist() for _, h in batch] == [[4, 5], [], [6]]
