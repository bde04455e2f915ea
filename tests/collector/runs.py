"""The recorded vLLM runs as records of the stream: KV batches from the frames, decisions and outcomes from what was asked and answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collector.bridge.recorded import read_frames, replay_frames
from schemas.block_hash import HashKey, hash_chain, root_hash, salted_extras
from schemas.kv_events import WorkerId
from schemas.requests import Decision, Outcome, pack_hashes

RUNS = Path(__file__).parents[1] / "fixtures" / "vllm-0.32.0"
FOLDERS = ("a-int-hash", "b-bytes-hash", "c-preemption", "d-two-dp-ranks", "e-per-request-metrics")
KEY = HashKey.from_hex("000102030405060708090a0b0c0d0e0f")
BLOCK = 32


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in gzip.decompress(path.read_bytes()).decode().splitlines()]


def kv_records(folder: str) -> Iterator[tuple[WorkerId, list[bytes]]]:
    for path in sorted((RUNS / folder).glob("frames*.jsonl.gz")):
        rank = int(path.name.split("rank")[1][0]) if "rank" in path.name else 0
        source = WorkerId("tiny", folder, rank)
        yield source, replay_frames(read_frames(path), source, KEY)


def expected() -> dict[tuple[str, int], dict[str, Any]]:
    return {(x["folder"], x["index"]): x for x in lines(RUNS / "expected_requests.jsonl.gz")}


def requests(folder: str) -> Iterator[tuple[Decision, Outcome]]:
    want = expected()
    for i, rec in enumerate(lines(RUNS / folder / "http.jsonl.gz")):
        if not rec.get("request"):
            continue
        ids = want[folder, i]["prompt_token_ids"]
        chain = None
        if ids is not None:
            blocks = len(ids) // BLOCK
            chain = hash_chain(KEY, root_hash(KEY, "tiny"), ids, BLOCK, salted_extras(KEY, blocks, rec["request"].get("cache_salt")))
        request_id = f"{folder}/{i}"
        decision = Decision(
            request_id=request_id, time_s=rec["t_start"], router="r1", pool="tiny", model="tiny", path=rec["path"], policy="round_robin",
            policy_version="1", token_source="exact" if ids else "none", prompt_tokens=len(ids) if ids else None, block_size=BLOCK,
            chain=None if chain is None else pack_hashes(chain), worker=folder, rank=None, stream=bool(rec["request"].get("stream")),
        )  # fmt: skip
        usage = rec.get("usage") or {}
        first = rec.get("t_first_byte")
        outcome = Outcome(
            request_id=request_id, time_s=rec["t_end"], worker=folder, status=rec["status"],
            error=None if rec["status"] == 200 else "upstream",
            ttft_s=None if first is None else first - rec["t_start"], e2e_s=rec["t_end"] - rec["t_start"],
            prompt_tokens=usage.get("prompt_tokens"), cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens"),
        )  # fmt: skip
        yield decision, outcome
