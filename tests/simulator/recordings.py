"""Reads the recorded vLLM runs, and says for each request when the engine admitted it and what it generated.

Both come from the recording's own event stream: a request's prefill ends with a store that runs exactly to the last whole block
of its prompt; its decode stores continue that chain and carry the generated token ids (only whole blocks are told, which is all
that a prefix cache can notice)."""

from __future__ import annotations

import base64
import gzip
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from simulator.prefix_cache import ROOT_DIGEST, block_digest

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32.0"
BLOCK_SIZE = 32


def read_jsonl(name: str) -> list[Any]:
    with gzip.open(FIXTURES / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def read_text(name: str) -> str:
    with gzip.open(FIXTURES / f"{name}.gz", "rt") as page:
        return page.read()


def read_batches(name: str) -> list[Any]:
    """The decoded payloads `[ts, events, rank]` of a frames file."""
    return [msgspec.msgpack.decode(base64.b64decode(m["frames"][2])) for m in read_jsonl(name)]


@dataclass
class Store:
    digests: list[bytes]  # of the simulator's own chain
    parent: bytes
    tokens: list[int]
    ts: float
    order: tuple[int, int]  # batch, event
    taken: bool = False


@dataclass
class Recorded:
    index: int
    note: str
    http: dict[str, Any]
    prompt: list[int]
    cached_tokens: int | None
    salt: str | None
    full_report: bool
    session_id: str | None
    start: float
    end: float
    completion_tokens: int
    chain: list[bytes]
    admitted_order: tuple[float, int] | None = None
    answer: list[int] = field(default_factory=list)
    decode_stores: list[tuple[float, int]] = field(default_factory=list)  # (ts, tokens computed by then)


def digest_chain(ids: list[int], salt: str | None) -> list[bytes]:
    packed, parent, chain = array("I", ids).tobytes(), ROOT_DIGEST, []
    for n in range(len(ids) // BLOCK_SIZE):
        content = packed[n * BLOCK_SIZE * 4 : (n + 1) * BLOCK_SIZE * 4]
        parent = block_digest(parent, content, [salt] if salt and n == 0 else None)
        chain.append(parent)
    return chain


def read_run(folder: str) -> tuple[list[Recorded], list[Any]]:
    """The answered requests of a one-rank run in order of completion, and its batches."""
    batches = read_batches(f"{folder}/frames")
    own: dict[Any, bytes] = {None: ROOT_DIGEST}
    stores: list[Store] = []
    resident: dict[bytes, int] = {}
    for b, (ts, events, _rank) in enumerate(batches):
        for e, event in enumerate(events):
            if event["type"] == "AllBlocksCleared":
                resident.clear()
            elif event["type"] == "BlockRemoved":
                for h in event["block_hashes"]:
                    resident[own[h]] -= 1
            else:
                parent = digest = own[event["parent_block_hash"]]
                digests = []
                for n, h in enumerate(event["block_hashes"]):
                    content = array("I", event["token_ids"][n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE]).tobytes()
                    digest = own[h] = block_digest(digest, content, event["extra_keys"][n])
                    digests.append(digest)
                if parent == ROOT_DIGEST and all(resident.get(d, 0) > 0 for d in digests):
                    continue  # a re-announcement (kv_cache_report_mode=full)
                for d in digests:
                    resident[d] = resident.get(d, 0) + 1
                stores.append(Store(digests, parent, event["token_ids"], ts, (b, e)))

    prompts = {(r["folder"], r["index"]): r for r in read_jsonl("expected_requests")}
    requests = []
    for index, http in enumerate(read_jsonl(f"{folder}/http")):
        expected = prompts[folder, index]
        if not expected["prompt_token_ids"]:
            continue
        body = http["request"]
        salt = body.get("cache_salt")
        requests.append(
            Recorded(
                index,
                http["note"],
                http,
                expected["prompt_token_ids"],
                expected["cached_tokens"],
                salt,
                bool(body.get("vllm_xargs")),
                http["request_headers"].get("X-Session-ID"),
                http["t_start"],
                http["t_end"],
                http["usage"]["completion_tokens"] if http["usage"] else body["max_tokens"],
                digest_chain(expected["prompt_token_ids"], salt),
            )
        )
    requests.sort(key=lambda r: r.start)
    for r in requests:
        _claim(r, stores)
    return requests, batches


def _claim(r: Recorded, stores: list[Store]) -> None:
    live = [s for s in stores if not s.taken and r.start <= s.ts <= r.end]
    for s in live:
        if len(s.digests) <= len(r.chain) and s.digests == r.chain[-len(s.digests) :]:
            s.taken = True
            r.admitted_order = (s.ts, s.order[1])
            break
    chain, tokens = list(r.chain), list(r.prompt)
    for s in live:
        if not s.taken and len(s.digests) == 1 and chain and s.parent == chain[-1]:
            tail = tokens[len(chain) * BLOCK_SIZE :]
            if s.tokens[: len(tail)] == tail:
                s.taken = True
                tokens += s.tokens[len(tail) :]
                chain.append(s.digests[0])
                r.decode_stores.append((s.ts, len(chain) * BLOCK_SIZE))
    r.answer = tokens[len(r.prompt) :]
