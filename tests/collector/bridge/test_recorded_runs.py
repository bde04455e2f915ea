"""A real vLLM's own frames through the whole pure path."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from collector.bridge.rank_feed import RankFeed
from collector.bridge.recorded import read_frames, replay_frames
from schemas.block_hash import hash_chain, root_hash, salted_extras
from schemas.kv_events import COMPLETE, Kind, WorkerId, decode
from schemas.workers import Trust
from tests.collector.bridge.wire import KEY

RUNS = Path(__file__).parents[2] / "fixtures" / "vllm-0.32.0"
BLOCK = 32
FRAMES = [
    ("a-int-hash", "frames", 0, 199), ("b-bytes-hash", "frames", 0, 131), ("c-preemption", "frames", 0, 131),
    ("d-two-dp-ranks", "frames_rank0", 0, 52), ("d-two-dp-ranks", "frames_rank1", 1, 56), ("e-per-request-metrics", "frames", 0, 50),
]  # fmt: skip
every_run = pytest.mark.parametrize(("folder", "name", "rank", "peak"), FRAMES, ids=[f"{f[0]}-{f[1]}" for f in FRAMES])


def lines_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


@every_run
def test_counts_match_the_pool_and_nothing_is_unknown(folder: str, name: str, rank: int, peak: int) -> None:
    frames = read_frames(RUNS / folder / f"{name}.jsonl.gz")
    feed = RankFeed(KEY, WorkerId("tiny", "w", rank), can_replay=False)
    for received_s, message in frames:
        feed.on_live(message, received_s)
    health = feed.health()
    assert health.peak_resident_blocks == peak
    assert (health.unknown_removals, health.unnamed_blocks, health.skipped_events, health.mangled_frames, health.lost_batches) == (0,) * 5
    assert health.trust is Trust.EXACT
    assert health.seq == len(frames) - 1
    assert feed.odd_ranks == 0


@every_run
def test_records_replayed_by_a_naive_reader_give_the_same_residency(folder: str, name: str, rank: int, peak: int) -> None:
    source = WorkerId("tiny", "w", rank)
    held: Counter[int] = Counter()
    top, seen = 0, []
    records = replay_frames(read_frames(RUNS / folder / f"{name}.jsonl.gz"), source, KEY)
    for record in records:
        batch = decode(record)
        assert batch.source == source
        seen += [(batch.first_seq, batch.last_seq)]
        for event, hashes in batch:
            if event["kind"] == Kind.STORED:
                held.update(hashes.tolist())
            elif event["kind"] == Kind.REMOVED:
                held.subtract(hashes.tolist())
            elif event["kind"] == Kind.CLEARED:
                held.clear()
            assert min(held.values(), default=0) >= 0
            top = max(top, held.total())
    assert top == peak
    first = decode(records[0])
    assert first.events[0]["kind"] == Kind.EPOCH_STARTED
    assert first.events[0]["flags"] == COMPLETE
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(seen))


def test_every_prompt_is_named_as_a_router_names_it() -> None:
    stored: dict[str, set[int]] = {}
    for folder, name, rank, _ in FRAMES:
        for record in replay_frames(read_frames(RUNS / folder / f"{name}.jsonl.gz"), WorkerId("tiny", "w", rank), KEY):
            for event, hashes in decode(record):
                if event["kind"] == Kind.STORED:
                    stored.setdefault(folder, set()).update(hashes.tolist())
    requests = {folder: [json.loads(line) for line in lines_of(RUNS / folder / "http.jsonl.gz")] for folder in stored}
    checked = 0
    root = root_hash(KEY, "tiny")
    for line in lines_of(RUNS / "expected_requests.jsonl.gz"):
        row = json.loads(line)
        if row["prompt_token_ids"] is None:
            continue
        ids, salt = row["prompt_token_ids"], requests[row["folder"]][row["index"]]["request"].get("cache_salt")
        names = hash_chain(KEY, root, ids, BLOCK, salted_extras(KEY, len(ids) // BLOCK, salt))
        assert set(names.tolist()) <= stored[row["folder"]]
        checked += 1
    assert checked == 172


def test_a_frame_a_record_and_gathered_frames_say_the_same() -> None:
    frames = read_frames(RUNS / "b-bytes-hash" / "frames.jsonl.gz")
    source = WorkerId("tiny", "w", 0)
    single, gathered = replay_frames(frames, source, KEY, batch_s=0), replay_frames(frames, source, KEY)
    assert len(frames) == len(single) > len(gathered)

    def rows(records: list[bytes]) -> list[tuple[bytes, list[int]]]:
        return [(event.tobytes(), hashes.tolist()) for record in records for event, hashes in decode(record)]

    assert rows(single) == rows(gathered)


def test_no_token_run_appears_in_any_record() -> None:
    source = WorkerId("tiny", "w", 0)
    blob = b"".join(replay_frames(read_frames(RUNS / "a-int-hash" / "frames.jsonl.gz"), source, KEY))
    for line in lines_of(RUNS / "expected_requests.jsonl.gz")[:20]:
        ids = json.loads(line)["prompt_token_ids"]
        if ids and len(ids) > 104:
            for width in (2, 4, 8):
                for order in ("little", "big"):
                    run = b"".join(t.to_bytes(width, order) for t in ids[100:104])
                    assert run not in blob
