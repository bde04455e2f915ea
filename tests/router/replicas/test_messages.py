"""The bytes between replicas: what is written is read, and nothing else is."""

import contextlib

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.replicas.messages import MAX_BLOCKS, TOPIC, FirstToken, Freed, Message, Reserved, Underway, decode, encode

HEAD = {"version": 1, "from": "r", "run": "x", "seq": 1, "key_id": "k"}
PLACE = ("pool", "worker", 0)


def read(content, blocks=b""):
    return decode([TOPIC, orjson.dumps(HEAD | content), blocks])


def same(a, b):
    if isinstance(a, Reserved):
        return isinstance(b, Reserved) and all(
            np.array_equal(getattr(a, f), getattr(b, f)) for f in ("flight", "place", "prefill_s", "streams", "blocks", "ttl_s")
        )
    return a == b


places = st.tuples(st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9), st.none() | st.integers(0, 9))
numbers, seconds = st.integers(0, 2**62), st.floats(0, 600)
blocks = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(lambda x: np.array(x, np.uint64))
reserved = st.builds(Reserved, numbers, places, seconds, st.booleans(), blocks, seconds)
events = st.lists(reserved | st.builds(FirstToken, numbers) | st.builds(Freed, numbers, st.booleans()), max_size=6).map(tuple)
flights = st.none() | st.lists(st.builds(Underway, numbers, places, seconds, st.booleans(), st.booleans()), max_size=4).map(tuple)


@settings(max_examples=40, deadline=None)
@given(st.builds(Message, st.just("r"), st.just("run"), numbers, st.just("k"), events, flights, st.booleans()))
def test_a_message_is_read_as_it_was_written(message):
    found = decode(encode(message))
    assert (found.sender, found.run, found.seq, found.key_id) == ("r", "run", message.seq, "k")
    assert (found.flights, found.bye) == (message.flights, message.bye)
    assert len(found.events) == len(message.events)
    assert all(map(same, found.events, message.events))


def test_fields_of_later_versions_are_ignored():
    assert read({"more": 1, "events": [["f", 3]]}).events == (FirstToken(3),)


def test_a_reservations_blocks_keep_no_others_alive():
    events = tuple(Reserved(n, PLACE, 0.1, True, np.arange(n, dtype=np.uint64), 1.0) for n in (1, MAX_BLOCKS))
    small, _ = decode(encode(Message("r", "x", 1, "k", events))).events
    assert small.blocks.base is None


def test_seconds_are_bounded():
    assert read({"flights": [[1, *PLACE, 1e9, True, True]]}).flights[0].prefill_s == 600


@pytest.mark.parametrize(
    ("content", "blocks"),
    [
        ({"version": 2}, b""),
        ({"seq": -1}, b""),
        ({"seq": True}, b""),
        ({"from": ""}, b""),
        ({"run": 7}, b""),
        ({"from": "x" * 2000}, b""),
        ({"events": 3}, b""),
        ({"events": [[]]}, b""),
        ({"events": [["q", 1]]}, b""),
        ({"events": [["f"]]}, b""),
        ({"events": [["x", 1, 1]]}, b""),
        ({"events": [["r", 1, *PLACE, 0.1, True, 2, 1.0]]}, b"12345678"),
        ({"events": [["r", 1, *PLACE, 0.1, True, 0, 1.0]]}, b"12345678"),
        ({"events": [["r", 1, *PLACE, 0.1, True, MAX_BLOCKS + 1, 1.0]]}, bytes(8 * MAX_BLOCKS + 8)),
        ({"events": [["r", 1, *PLACE, -0.1, True, 0, 1.0]]}, b""),
        ({"events": [["r", 1, *PLACE, "0", True, 0, 1.0]]}, b""),
        ({"events": [["r", 1, "pool", None, 0, 0.1, True, 0, 1.0]]}, b""),
        ({"events": [["f", 1]]}, b"1234567"),
        ({"events": [["f", 1]] * 10_001}, b""),
        ({"flights": [[1, *PLACE, 0.1, True]]}, b""),
        ({"flights": {}, "events": {"a": 1}}, b""),
    ],
)
def test_what_is_no_message_is_refused(content, blocks):
    with pytest.raises(ValueError, match=r"."):
        read(content, blocks)


@pytest.mark.parametrize("frames", [[], [TOPIC], [b"other", b"{}", b""], [TOPIC, b"{", b""], [TOPIC, b"[]", b""], [TOPIC, b"\xff", b""]])
def test_frames_of_something_else_are_refused(frames):
    with pytest.raises(ValueError, match=r"."):
        decode(frames)


strange = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=9,
)
rows = st.lists(st.tuples(st.sampled_from("rfx"), st.lists(strange, max_size=8)).map(lambda row: [row[0], *row[1]]) | strange, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*HEAD, "bye"]), strange, max_size=2), rows, strange | st.lists(strange), st.binary(max_size=24))
def test_strange_json_is_read_or_refused(head, events, flights, blocks):
    with contextlib.suppress(ValueError):
        read(head | {"events": events, "flights": flights}, blocks)


@given(st.binary(max_size=60), st.binary(max_size=24))
def test_no_bytes_raise_anything_else(head, blocks):
    with pytest.raises(ValueError, match=r"."):
        decode([TOPIC, head, blocks])
