"""What the bridges of the mock workers would say, so that our router's index knows what they hold.

    decisions of the warm-up  ->  the chains of their prompts  ->  kv-events STORED on the worker that each went to
    meanwhile                 ->  a steady flow: blocks stored and as many removed on every worker, and its worker-load once a second

The flow is part of what our router has to do in the benchmark, as it is in life; the peers have no such work.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers import POOL, WORKERS, worker_name
from schemas.block_hash import HashKey, root_hash
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId, encode
from schemas.stream import Stream, open_stream
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, WORKER_LOAD, topic_specs
from schemas.workers import BridgeHealth, Trust, WorkerLoad

BLOCK_TOKENS = 16
RECORDS_PER_S = 10  # a worker
BLOCKS_PER_RECORD = 32  # stored, and as many removed
_KEPT_RECORDS = 20


class BridgeStandIn:
    """Writes on behalf of the bridges from `start` to `stop`."""

    def __init__(self, stream_url: str, key_file: Path) -> None:
        self._key = HashKey.from_hex(key_file.read_text())
        self._stream: Stream = open_stream(stream_url)
        self._stream.ensure_topics(topic_specs())
        self._writer = self._stream.writer()
        self._sources = [WorkerId(POOL, worker_name(n), 0) for n in range(WORKERS)]
        self._seq = [0] * WORKERS
        self._rng = np.random.default_rng(1)
        self._flowing: list[list[np.ndarray[Any, np.dtype[np.uint64]]]] = [[] for _ in self._sources]
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._flow, name="bridge-stand-in", daemon=True)
        for n in range(WORKERS):
            self._say(n, [(Kind.EPOCH_STARTED, 0)], np.zeros(0, np.uint64))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._writer.close(10)
        self._stream.close()

    def announce_prompts(self, expected: int, limit_s: float = 60.0) -> int:
        """Announces the blocks of all decisions so far on the workers that they name. Returns how many blocks. Waits until `expected`
        decisions are there."""
        held: list[dict[int, None]] = [{} for _ in self._sources]
        number = {s.worker: n for n, s in enumerate(self._sources)}
        reader = self._stream.reader()
        found, deadline = 0, time.monotonic() + limit_s
        try:
            reader.assign({(DECISIONS, part): offset for part, offset in self._stream.start_offsets(DECISIONS).items()})
            while found < expected:
                if time.monotonic() > deadline:
                    raise SystemExit(f"of {expected} decisions of the warm-up {found} are in the stream")
                for slice_ in reader.poll(0.2, 1000):
                    for record in slice_.records:
                        decision = json.loads(record.value or b"{}")
                        found += 1
                        if decision.get("chain"):
                            chain = np.frombuffer(base64.b64decode(decision["chain"]), "<u8")
                            held[number[decision["worker"]]] |= dict.fromkeys(chain.tolist())
        finally:
            reader.close()
        for n, blocks in enumerate(held):
            hashes = np.fromiter(blocks, np.uint64, len(blocks))
            for at in range(0, len(hashes), 4096):
                part = hashes[at : at + 4096]
                self._say(n, [(Kind.STORED, len(part))], part)
        self._writer.flush(30)
        return sum(map(len, held))

    def written(self) -> dict[str, int]:
        """Records in the stream, by topic."""
        return {
            topic: sum(self._stream.end_offsets(topic).values()) - sum(self._stream.start_offsets(topic).values())
            for topic in (DECISIONS, OUTCOMES)
        }

    def _say(self, n: int, events: list[tuple[Kind, int]], hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        now_s = time.time()
        with self._lock:
            seq = self._seq[n]
            self._seq[n] += 1
            rows = np.zeros(len(events), EVENT)
            for row, (kind, count) in zip(rows, events, strict=True):
                row["kind"], row["count"], row["seq"], row["time_s"], row["block_size"] = kind, count, seq, now_s, BLOCK_TOKENS
                row["flags"] = COMPLETE if kind == Kind.EPOCH_STARTED else 0
                row["parent"] = root_hash(self._key, POOL) if kind == Kind.STORED else 0
            source = self._sources[n]
            self._writer.append(KV_EVENTS, source.key, encode(KvBatch(source, 1, seq, seq, now_s, now_s, rows, hashes)))

    def _flow(self) -> None:
        last_load_s = 0.0
        while not self._stopping.wait(1 / RECORDS_PER_S):
            for n in range(WORKERS):
                stored = self._rng.integers(1, 1 << 63, BLOCKS_PER_RECORD).astype(np.uint64)
                self._flowing[n].append(stored)
                events, hashes = [(Kind.STORED, len(stored))], stored
                if len(self._flowing[n]) > _KEPT_RECORDS:
                    removed = self._flowing[n].pop(0)
                    events, hashes = [(Kind.REMOVED, len(removed)), *events], np.concatenate([removed, stored])
                self._say(n, events, hashes)
            if time.monotonic() - last_load_s > 1.0:
                last_load_s = time.monotonic()
                for source in self._sources:
                    self._writer.append(WORKER_LOAD, source.key, self._load(source))

    def _load(self, source: WorkerId) -> bytes:
        health = BridgeHealth(trust=Trust.EXACT, epoch=1, key_id=self._key.key_id)
        load = WorkerLoad(
            pool=source.pool, worker=source.worker, rank=0, time_s=time.time(), engine="vllm", up=True, running=1.0, waiting=0.0,
            kv_usage=0.5, capacity_blocks=100_000, block_size=BLOCK_TOKENS, bridge=health,
        )  # fmt: skip
        return load.model_dump_json().encode()
