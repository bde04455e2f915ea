"""How many blocks a second the bridge carries from an engine's ZeroMQ socket to the stream, and how late they arrive.

    python -m bench.bench_bridge [--seconds 5]

A separate process publishes frames as vLLM 0.32 writes them (map events, integer hashes, 16 tokens a block, token ids up to 150 000) with
1, 8 or 64 blocks an event; once a cache of 8192 blocks is full, each store is preceded by the removals that make room, one event a block.

Throughput: as fast as the publisher can, into the local log; blocks stored and removed per CPU second of the bridge's event thread, and
of the whole process (socket IO and the log's writer included). Latency: 200 batches a second, from the engine's time stamp to when a
reader of the log has the record. Progress goes to stderr; the last line of stdout is one JSON object, also kept under bench/results/.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from bench.machine import describe_machine, write_result
from collector.bridge.discovery import Endpoints
from collector.bridge.event_thread import EventThread
from collector.bridge.outbox import Outbox
from schemas.block_hash import HashKey
from schemas.kv_events import Kind, WorkerId, decode
from schemas.stream import Stream, open_stream
from schemas.topics import KV_EVENTS, topic_specs

BLOCKS_PER_EVENT = (1, 8, 64)
BLOCK_TOKENS = 16
VOCABULARY = 150_000
CACHE_BLOCKS = 8192
LATENCY_BATCHES_PER_S = 200
LATENCY_BLOCKS = 8
SOURCE = WorkerId("bench", "engine", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="of publishing for each measurement (default 5)")
    parser.add_argument("--feed", nargs=3, metavar=("BLOCKS", "BATCHES", "RATE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feed:
        _feed(int(args.feed[0]), int(args.feed[1]), float(args.feed[2]))
        return
    result: dict[str, Any] = {"benchmark": "bridge", "machine": describe_machine(), "block_tokens": BLOCK_TOKENS, "throughput": {}}
    for blocks in BLOCKS_PER_EVENT:
        result["throughput"][f"{blocks}_blocks_per_event"] = _throughput(blocks, args.seconds)
    result["latency"] = _latency(args.seconds)
    result["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    write_result("bridge", result)
    print(json.dumps(result))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _batches(blocks: int, count: int) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Events of each batch and how many blocks they store and remove: chains of up to 64 blocks, oldest chain evicted first, tail first."""
    rng = random.Random(blocks)
    held: list[list[int]] = []
    n_held = 0
    for _ in range(count):
        events: list[dict[str, Any]] = []
        moved = blocks
        while n_held + blocks > CACHE_BLOCKS:
            old = held.pop(0)
            n_held -= len(old)
            moved += len(old)
            events += [{"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU", "group_idx": 0} for h in reversed(old)]
        parent = held[-1][-1] if held and len(held[-1]) + blocks <= 64 else None
        hashes = [rng.getrandbits(64) for _ in range(blocks)]
        if parent is None:
            held.append([])
        held[-1] += hashes
        n_held += blocks
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": [rng.randrange(VOCABULARY) for _ in range(BLOCK_TOKENS * blocks)],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * blocks,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        yield events, moved


def _feed(blocks: int, count: int, rate: float) -> None:
    """The publishing process. rate: batches a second, 0 for as fast as possible. Talks to its parent over stdout and stdin."""
    encode = msgspec.msgpack.encode
    prepared: list[bytes | list[dict[str, Any]]] = []
    total = 0
    for events, moved in _batches(blocks, count):
        prepared.append(events if rate else encode([time.time(), events, 0]))
        total += moved
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, -1)
    socket.bind("tcp://127.0.0.1:*")
    print(json.dumps({"address": socket.getsockopt_string(zmq.LAST_ENDPOINT), "blocks": total}), flush=True)
    socket.recv()  # the bridge has subscribed
    began = time.monotonic()
    for seq, batch in enumerate(prepared):
        if rate:
            time.sleep(max(0.0, began + seq / rate - time.monotonic()))
        body = batch if isinstance(batch, bytes) else encode([time.time(), batch, 0])
        socket.send_multipart([b"kv-events", seq.to_bytes(8, "big"), body])
    sys.stdin.readline()
    context.destroy(linger=0)


@contextmanager
def _feeder(blocks: int, count: int, rate: float) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.bench_bridge", "--feed", str(blocks), str(count), str(rate)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield said["address"], said["blocks"]
        assert process.stdin is not None
        process.stdin.write("done\n")
        process.stdin.flush()
        process.wait(30)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _bridge(address: str) -> Iterator[tuple[EventThread, Stream]]:
    with tempfile.TemporaryDirectory() as folder, open_stream(f"local:{Path(folder) / 'stream.sqlite'}") as stream:
        stream.ensure_topics(topic_specs(partitions=1))
        outbox = Outbox(KV_EVENTS, 256 << 20, time.time, lambda source: None)
        writer = stream.writer(on_failure=outbox.on_failure)
        events = EventThread(HashKey(1, 2), outbox, writer)
        events.start()
        try:
            events.connect(SOURCE, Endpoints(address))
            yield events, stream
            writer.flush(60)
        finally:
            events.stop(10)
            writer.close(10)


def _until_seq(events: EventThread, seq: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (health := events.health.get(SOURCE)) is None or (health.seq or 0) < seq:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the bridge has reached {health.seq if health else None} of {seq}")
        time.sleep(0.02)


def _throughput(blocks: int, seconds: float) -> dict[str, Any]:
    count = int(seconds * {1: 25_000, 8: 12_000, 64: 2_500}[blocks])
    _say(f"{blocks} blocks an event: preparing {count} batches ...")
    with _feeder(blocks, count, 0) as (address, total), _bridge(address) as (events, _):
        while not events.health:
            time.sleep(0.01)
        cpu, wall, thread_cpu = time.process_time(), time.monotonic(), events.cpu_s
        _until_seq(events, count - 1, 300)
        cpu, wall, thread_cpu = time.process_time() - cpu, time.monotonic() - wall, events.cpu_s - thread_cpu
        health = events.health[SOURCE]
        lost = health.lost_batches + health.unknown_removals + health.unnamed_blocks + health.mangled_frames
        if lost:
            raise RuntimeError(f"the bridge lost or misread something: {health}")
    measured = {
        "batches": count,
        "block_events": total,
        "block_events_per_s_of_event_thread_cpu": round(total / thread_cpu),
        "block_events_per_s_of_process_cpu": round(total / cpu),
        "block_events_per_s_wall": round(total / wall),
        "us_per_batch": round(thread_cpu / count * 1e6, 1),
    }
    _say(f"  {measured['block_events_per_s_of_event_thread_cpu']:,} block events a CPU second ({measured['us_per_batch']} us a batch)")
    return measured


def _latency(seconds: float) -> dict[str, Any]:
    count = int(seconds * LATENCY_BATCHES_PER_S)
    _say(f"latency: {count} batches at {LATENCY_BATCHES_PER_S} a second ...")
    late_s: list[float] = []
    with _feeder(LATENCY_BLOCKS, count, LATENCY_BATCHES_PER_S) as (address, _), _bridge(address) as (events, stream):
        reader = stream.reader()
        try:
            reader.assign({(KV_EVENTS, 0): 0})
            deadline = time.monotonic() + seconds + 30
            newest = -1
            while newest < count - 1 and time.monotonic() < deadline:
                slices = reader.poll(0.05, 1000)
                now_s = time.time()
                for part in slices:
                    for record in part.records:
                        batch = decode(record.value or b"")
                        rows = batch.events[batch.events["kind"] == Kind.STORED]
                        late_s += (now_s - rows["time_s"]).tolist()
                        newest = batch.last_seq
        finally:
            reader.close()
        _until_seq(events, count - 1, 5)
    p50, p99, worst = np.percentile(late_s, [50, 99, 100]) * 1000
    measured = {
        "batches_per_s": LATENCY_BATCHES_PER_S,
        "blocks_per_batch": LATENCY_BLOCKS,
        "events": len(late_s),
        "engine_to_reader_p50_ms": round(float(p50), 2),
        "engine_to_reader_p99_ms": round(float(p99), 2),
        "engine_to_reader_max_ms": round(float(worst), 2),
    }
    _say(f"  p50 {measured['engine_to_reader_p50_ms']} ms, p99 {measured['engine_to_reader_p99_ms']} ms")
    return measured


if __name__ == "__main__":
    main()
