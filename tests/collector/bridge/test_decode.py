from __future__ import annotations

import base64
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from collector.bridge.decode import (
    EMPTY_TUPLE_HASH,
    MASK64,
    BadFrame,
    Batch,
    Cleared,
    Removed,
    Stored,
    decode_batch,
    split_frames,
    split_replay,
)
from schemas.kv_events import Tier
from tests.collector.bridge.wire import message, payload, removed, stored

FIXTURES = Path(__file__).parents[2] / "fixtures"
LAYOUTS = [json.loads(line) for line in (FIXTURES / "layouts.jsonl").read_text().splitlines()]
FIELDS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
          "kv_cache_spec_kind"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "told", "windowed", "window"),
    [
        ("sliding_window", 128, True, 128),
        ("sliding_window_mla", 1 << 30, True, (1 << 24) - 1),
        ("sliding_window", None, True, 0),
        ("chunked_local_attention", "128", True, 0),
        ("sliding_window", True, True, 0),
        ("sliding_window", -1, True, 0),
        ("mamba", None, True, 1),
        ("full_attention", 128, False, 0),
        (None, 128, False, 0),
    ],
)
def test_the_window_of_a_group_without_full_attention_is_read(kind: Any, told: Any, windowed: bool, window: int) -> None:
    keyed = stored([1], [1, 2, 3, 4], kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=told)
    in_order = ["BlockStored", *(keyed.get(name) for name in FIELDS), told]
    for event in decode_batch(payload(keyed, in_order)).events:
        assert isinstance(event, Stored)
        assert (event.windowed, event.window, event.block_size) == (windowed, window, 4)


def u64(raw: Any) -> int:
    return int(raw["hex"][-16:], 16) if isinstance(raw, dict) else raw & MASK64


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x['engine']}-{x['from']}-{x['note'][:24]}")
def test_every_layout_decodes_to_its_content(layout: dict[str, Any]) -> None:
    seq, body = split_frames([base64.b64decode(f) for f in layout["frames"]])
    assert seq == (1 if layout["engine"] == "mooncake-master" else 7)
    batch = decode_batch(body)
    said = layout["decoded"]
    said_ts, said_events = (said["ts"], said["events"]) if isinstance(said, dict) else (said[0], said[1])
    assert batch.time_s == (1_700_000_000.5)
    assert said_ts in (1_700_000_000.5, 1_700_000_000_500)
    assert (batch.skipped, batch.unknown_media) == (0, 0)
    assert batch.rank == (said.get("data_parallel_rank") if isinstance(said, dict) else said[2] if len(said) > 2 else None)
    assert len(batch.events) == len(said_events)
    for got, raw in zip(batch.events, said_events, strict=True):
        tag = raw["type"] if isinstance(raw, dict) else raw[0]
        if tag == "AllBlocksCleared":
            assert isinstance(got, Cleared)
            continue
        names = FIELDS if tag == "BlockStored" else ["block_hashes", "medium", "group_idx"]
        want = raw if isinstance(raw, dict) else dict(zip(names, raw[1:], strict=False))
        assert isinstance(got, Stored if tag == "BlockStored" else Removed)
        assert not isinstance(got, Cleared)
        assert got.hashes.tolist() == [u64(h) for h in want["block_hashes"]]
        medium = want.get("medium")
        assert got.tier == {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.CPU, "cpu": Tier.CPU, "CPU_PINNED": Tier.CPU}[medium]
        assert got.group == (want.get("group_idx") or 0)
        if isinstance(got, Stored):
            parent = want["parent_block_hash"]
            assert got.parent == (None if parent is None or u64(parent) == 0 else u64(parent))
            tokens = [t[0] if isinstance(t, list) else t for t in want["token_ids"] or []]
            assert (got.tokens.tolist() if got.tokens is not None else []) == tokens
            assert got.block_size == (want["block_size"] or 0)
            assert got.lora == want.get("lora_name")
            assert not got.windowed
            assert got.extras == (((want["cache_salt"],),) if want.get("cache_salt") else None)


@pytest.mark.parametrize(
    ("medium", "tier", "unknown"),
    [(None, Tier.GPU, 0), ("GPU", Tier.GPU, 0), ("gpu", Tier.GPU, 0), ("CPU", Tier.CPU, 0), ("cpu", Tier.CPU, 0),
     ("CPU_PINNED", Tier.CPU, 0), ("STORAGE", Tier.DISK, 0), ("DISK", Tier.DISK, 0), ("EXTERNAL", Tier.EXTERNAL, 0),
     ("cuda:0", Tier.EXTERNAL, 1), ("tape", Tier.EXTERNAL, 1)],
)  # fmt: skip
def test_media_become_tiers(medium: str | None, tier: Tier, unknown: int) -> None:
    batch = decode_batch(payload(stored([1], [1, 2, 3, 4], medium=medium)))
    assert isinstance(batch.events[0], Stored)
    assert batch.events[0].tier is tier
    assert batch.unknown_media == unknown


def test_lora_names_leave_the_extra_keys_and_the_rest_stays() -> None:
    event = stored([1, 2, 3], list(range(12)), lora_name="sql", extra_keys=[["sql", "tenant"], ["sql"], ["sql", ["img", 3]]])
    got = decode_batch(payload(event)).events[0]
    assert isinstance(got, Stored)
    assert got.extras == (("tenant",), None, (["img", 3],))
    assert got.lora == "sql"


def test_an_adapter_known_by_number_only_is_kept_apart_from_the_base_model() -> None:
    got = decode_batch(payload(["BlockStored", [1], None, [1, 2, 3, 4], 4, 9])).events[0]
    assert isinstance(got, Stored)
    assert got.lora == "lora-id:9"


def test_sglang_salt_goes_into_a_first_block_only() -> None:
    first, later = decode_batch(
        payload(stored([1, 2], list(range(8)), cache_salt="t"), stored([3], [1, 2, 3, 4], parent=2, cache_salt="t"))
    ).events
    assert isinstance(first, Stored)
    assert isinstance(later, Stored)
    assert first.extras == (("t",), None)
    assert later.extras is None


@pytest.mark.parametrize("parent", [0, EMPTY_TUPLE_HASH])
def test_old_sglang_spellings_of_the_root_are_the_root(parent: int) -> None:
    got = decode_batch(payload(stored([1], [1, 2, 3, 4], parent=parent))).events[0]
    assert isinstance(got, Stored)
    assert got.parent is None
    assert hash(()) == EMPTY_TUPLE_HASH


@pytest.mark.parametrize(
    "bad",
    [
        ["NoSuchEvent", 1], {"type": "NoSuchEvent"}, {}, [], 7, None, "BlockStored",
        stored([1], [1, -2, 3, 4]), stored([1], [1, 2, 3, 1 << 33]), stored([1], ["text"]), stored([1], "text"),
        stored([1.5], [1, 2, 3, 4]), stored([None], [1, 2, 3, 4]), stored([b""], [1, 2, 3, 4]),
        stored([1], [1, 2, 3, 4], size=-4), stored([1], [1, 2, 3, 4], size=1 << 20), stored([1], [1, 2, 3, 4], medium=3),
        stored([1], [1, 2, 3, 4], group_idx=-1), stored([1], [1, 2, 3, 4], extra_keys=[["a"], ["b"]]),
        stored([1], [1, 2, 3, 4], extra_keys=["tenant"]), stored([1], [1, 2, 3, 4], lora_name=3),
        {"type": "BlockRemoved"}, {"type": "BlockStored"}, removed(["x"]),
    ],
)  # fmt: skip
def test_a_bad_event_costs_only_itself(bad: Any) -> None:
    batch = decode_batch(payload(removed([5]), bad, removed([6])))
    assert batch.skipped == 1
    assert [int(e.hashes[0]) for e in batch.events if isinstance(e, Removed)] == [5, 6]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x92\x01", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode("x"),
     msgspec.msgpack.encode([1.0, {"a": 1}]), msgspec.msgpack.encode({"ts": 1.0}), msgspec.msgpack.encode(None)],
)  # fmt: skip
def test_a_mangled_payload_is_a_bad_frame(body: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_batch(body)


@pytest.mark.parametrize("frames", [[], [b"a"], [b"a", b"b"], [b"", b"1234567", b"x"], [b"", b"\xff" * 8, b"x"], [b""] * 4])
def test_a_message_of_another_shape_is_a_bad_frame(frames: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        split_frames(frames)


def test_replay_answers_are_read_from_the_end() -> None:
    seq = (3).to_bytes(8, "big")
    assert split_replay([b"", seq, b"p"]) == (3, b"p")
    assert split_replay([b"", b"topic", seq, b"p"]) == (3, b"p")
    assert split_replay([b"", b"\xff" * 8, b""]) is None
    assert split_replay([b"", b"", b"\xff" * 8, b""]) is None
    with pytest.raises(BadFrame):
        split_replay([b"x"])


def test_times_that_are_none_or_in_milliseconds() -> None:
    def time_s(ts: Any) -> float | None:
        return decode_batch(msgspec.msgpack.encode([ts, []])).time_s

    assert time_s(1_700_000_000_500) == 1_700_000_000.5
    assert time_s(1_700_000_000.5) == 1_700_000_000.5
    assert [time_s(x) for x in (None, "now", True, -1, float("nan"), float("inf"))] == [None] * 6


def test_random_and_damaged_bytes_raise_nothing_else() -> None:
    rng = random.Random(7)
    good = [base64.b64decode(layout["frames"][2]) for layout in LAYOUTS]
    read = 0
    for _ in range(4000):
        body = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 6)):
            kind, at = rng.randrange(3), rng.randrange(len(body))
            if kind == 0:
                body[at] = rng.randrange(256)
            elif kind == 1:
                del body[at : at + rng.randint(1, 4)]
            else:
                body[at:at] = rng.randbytes(rng.randint(1, 4))
            body = body or bytearray(b"\x00")
        with contextlib.suppress(BadFrame):
            read += isinstance(decode_batch(bytes(body)), Batch)
    assert 0 < read < 4000


def test_tokens_never_show_in_a_repr_or_an_error() -> None:
    batch = decode_batch(payload(stored([1], [123123, 2, 3, 4])))
    assert "123123" not in repr(batch)
    assert "123123" not in repr(batch.events[0])
    with pytest.raises(BadFrame) as error:
        decode_batch(msgspec.msgpack.encode([1.0, "secret text"]))
    assert "secret" not in str(error.value)


def test_message_helper_makes_what_split_frames_reads() -> None:
    assert split_frames(message(9, b"x")) == (9, b"x")


def test_hashes_keep_all_64_bits() -> None:
    got = decode_batch(payload(removed([(1 << 64) - 1, 1 << 63, 0]), removed([-1, 5]))).events
    assert isinstance(got[0], Removed)
    assert isinstance(got[1], Removed)
    assert got[0].hashes.dtype == np.uint64
    assert got[0].hashes.tolist() == [(1 << 64) - 1, 1 << 63, 0]
    assert got[1].hashes.tolist() == [(1 << 64) - 1, 5]
