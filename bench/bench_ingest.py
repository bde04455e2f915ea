"""Block events a second that the collector takes from a real Kafka into the published DuckDB, how soon they are seen, in how much memory.

    python -m bench.bench_ingest [--block-events 20000000] [--seconds 20]

Throughput, at 1, 8 and 64 blocks a record: records made beforehand wait in Kafka (4 partitions, zstd) while the collector's process is
stopped; then it goes on, and the time and CPU time until it has committed them all count. Half of the blocks are stored and half removed
once the fleet (8 workers) is full; at 64 blocks a record it fills up to 5 million blocks first, which gives the peak memory.
Time to visible: records of 64 blocks at a steady rate, and five markers a second; from a marker's hand-over to Kafka to when a query of the
published file finds it. Progress goes to stderr; the last line of stdout is one JSON object, also kept under bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import describe_machine, write_result
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId, encode
from schemas.stream import Stream, StreamFull, Writer, open_stream
from schemas.tables.read import FILE_NAME, PublishedError, open_published
from schemas.topics import KV_EVENTS, topic_specs

KAFKA = Path(__file__).parents[1] / "deploy" / "kafka" / "kafka.sh"
WORKERS = tuple(WorkerId("bench", f"gpu-{i}", 0) for i in range(8))
MARKER = WorkerId("bench", "marker", 0)
RESIDENT = {1: 200_000, 8: 1_000_000, 64: 5_000_000}
LIVE_RECORDS_PER_S = 2000
MARKERS_PER_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block-events", type=int, default=20_000_000, help="at 64 blocks a record; fewer at 8 and 1 (default 20 million)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steady traffic for the time to visible (default 20)")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "ingest", "machine": describe_machine(), "throughput": {}}
    with tempfile.TemporaryDirectory(prefix="bench-ingest-") as folder:
        root = Path(folder)
        bootstrap = _kafka("start", root)
        try:
            for blocks, share in ((1, 50), (8, 8), (64, 1)):
                result["throughput"][f"{blocks}_blocks_per_record"] = _throughput(bootstrap, root, blocks, args.block_events // share)
            result["visible"] = _visible(bootstrap, root, args.seconds)
        finally:
            _kafka("stop", root)
    result["target"] = {"block_events_per_core_s": 2_000_000, "visible_p99_s": 2.0, "peak_rss_mb": 1536}
    write_result("ingest", result)
    print(json.dumps(result))


class CollectorProcess:
    """`warmwatch collect` over a topic prefix of its own."""

    def __init__(self, bootstrap: str, root: Path, name: str) -> None:
        self.data_dir = root / name
        self._log = (root / f"{name}.log").open("w")
        arguments = [
            "--stream", f"kafka://{bootstrap}", "--topic-prefix", f"{name}.", "--data-dir", str(self.data_dir), "--metrics-port", "0",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmwatch", "collect", *arguments], stdout=self._log, stderr=self._log, cwd=Path(__file__).parents[1]
        )
        self._address = ""
        deadline = time.monotonic() + 60
        while not self._ready(root / f"{name}.log"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"the collector did not start: {(root / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def _ready(self, log: Path) -> bool:
        for line in log.read_text().splitlines():
            if "status on http://" in line:
                self._address = line.split("status on ")[1].removesuffix("/readyz")
        if not self._address:
            return False
        try:
            with urllib.request.urlopen(self._address + "/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self._address + "/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[1])
        raise KeyError(name)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_rss_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
        raise KeyError("VmHWM")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(60)
        self._log.close()


def records(blocks: int, block_events: int, resident: int, start_s: float) -> Iterator[tuple[WorkerId, bytes]]:
    """Records of `blocks` blocks each: stores until the fleet holds `resident`, then as many removals (of the oldest) as stores."""
    rng = np.random.default_rng(blocks)
    held: list[list[np.ndarray[Any, np.dtype[np.uint64]]]] = [[] for _ in WORKERS]
    oldest = [0] * len(WORKERS)
    held_blocks = 0
    for i in range(block_events // blocks):
        w, time_s = i % len(WORKERS), start_s + i * 1e-5
        full = held_blocks >= resident
        stored = rng.integers(1, 1 << 63, blocks if not full else max(1, blocks // 2)).astype(np.uint64)
        events: list[tuple[int, int]] = []
        hashes = []
        if full and (blocks > 1 or i // len(WORKERS) % 2):
            removed = held[w][oldest[w]]
            if len(removed) > blocks - len(stored) > 0:
                held[w][oldest[w]] = removed[len(removed) // 2 :]
                removed = removed[: len(removed) // 2]
            else:
                oldest[w] += 1
            events.append((Kind.REMOVED, len(removed)))
            hashes.append(removed)
            held_blocks -= len(removed)
        if blocks > 1 or not events:
            events.append((Kind.STORED, len(stored)))
            hashes.append(stored)
            held[w].append(stored)
            held_blocks += len(stored)
        yield WORKERS[w], _record(WORKERS[w], i // len(WORKERS), time_s, events, np.concatenate(hashes))


def _record(worker: WorkerId, seq: int, time_s: float, events: Sequence[tuple[int, int]], hashes: Any) -> bytes:
    if seq == 0:
        events = [(Kind.EPOCH_STARTED, 0), *events]
    rows = np.zeros(len(events), EVENT)
    for row, (kind, count) in zip(rows, events, strict=True):
        row["kind"], row["count"], row["seq"], row["time_s"], row["block_size"] = kind, count, seq, time_s, 16
        row["flags"] = COMPLETE if kind == Kind.EPOCH_STARTED else 0
    return encode(KvBatch(worker, 1, seq, seq, time_s, time_s, rows, hashes))


def _append(writer: Writer, topic: str, worker: WorkerId, record: bytes) -> None:
    while True:
        try:
            writer.append(topic, worker.key, record)
            return
        except StreamFull:
            time.sleep(0.005)


def _throughput(bootstrap: str, root: Path, blocks: int, block_events: int) -> dict[str, Any]:
    name = f"b{blocks}"
    topic = f"{name}.{KV_EVENTS}"
    collector = CollectorProcess(bootstrap, root, name)
    try:
        with open_stream(f"kafka://{bootstrap}") as stream:
            stream.ensure_topics(topic_specs(f"{name}."))
            collector.process.send_signal(signal.SIGSTOP)
            _say(f"{blocks} blocks a record: producing {block_events:,} block events ...")
            count, payload, sent = 0, 0, 0
            writer = stream.writer()
            for worker, record in records(blocks, block_events, RESIDENT[blocks], time.time()):
                _append(writer, topic, worker, record)
                count += 1
                payload += len(record)
                sent += int.from_bytes(record[60:64], "little")
            writer.flush(120)
            writer.close(10)
        idle_mb = collector.peak_rss_mb()
        cpu, wall = collector.cpu_s(), time.perf_counter()
        collector.process.send_signal(signal.SIGCONT)
        while (done := collector.metric("warmwatch_collector_block_events_total")) < sent:
            _say(f"  {done / sent:.0%}")
            time.sleep(0.5)
        cpu, wall = collector.cpu_s() - cpu, time.perf_counter() - wall
        published = _ask(collector.data_dir, "SELECT sum(blocks) FROM kv_events")
        resident = _ask(collector.data_dir, "SELECT sum(resident_blocks) FROM workers")
        if published != sent:
            raise SystemExit(f"{sent} block events were sent, {published} were published")
        found = {
            "records": count,
            "block_events": sent,
            "record_bytes": payload // count,
            "wall_s": round(wall, 2),
            "cpu_s": round(cpu, 2),
            "block_events_per_core_s": round(sent / cpu),
            "block_events_per_wall_s": round(sent / wall),
            "records_per_core_s": round(count / cpu),
            "resident_blocks": int(resident),
            "idle_rss_mb": idle_mb,
            "peak_rss_mb": collector.peak_rss_mb(),
        }
        _say(f"  {found['block_events_per_core_s']:,} block events per core second, peak {found['peak_rss_mb']:.0f} MB")
        return found
    finally:
        collector.stop()


def _visible(bootstrap: str, root: Path, seconds: float) -> dict[str, Any]:
    """Steady traffic with markers; each marker's time from append to found."""
    topic = f"live.{KV_EVENTS}"
    collector = CollectorProcess(bootstrap, root, "live")
    handed: dict[int, float] = {}
    found: dict[int, float] = {}
    done = threading.Event()
    try:
        with open_stream(f"kafka://{bootstrap}") as stream:
            stream.ensure_topics(topic_specs("live."))
            producer = threading.Thread(target=_steady, args=(stream, topic, seconds, handed, done))
            producer.start()
            last_said = 0.0
            deadline = time.monotonic() + seconds + 30
            while (not done.is_set() or len(found) < len(handed)) and time.monotonic() < deadline:
                newest = _ask(collector.data_dir, "SELECT max(seq) FROM kv_events WHERE worker = 'marker'")
                now = time.perf_counter()
                for seq in range(-1 if newest is None else int(newest) + 1):
                    found.setdefault(seq, now)
                if now - last_said > 5:
                    last_said = now
                    _say(f"  steady traffic: {len(handed)} markers sent, {len(found)} seen")
                time.sleep(0.02)
            producer.join()
        waits = np.array([found[s] - t for s, t in list(handed.items()) if s in found])
        if len(waits) < len(handed):
            raise SystemExit(f"{len(handed) - len(waits)} of {len(handed)} markers were never seen")
        out = {
            "records_per_s": LIVE_RECORDS_PER_S,
            "block_events_per_s": LIVE_RECORDS_PER_S * 64,
            "markers": len(waits),
            "p50_s": round(float(np.percentile(waits, 50)), 3),
            "p99_s": round(float(np.percentile(waits, 99)), 3),
            "max_s": round(float(waits.max()), 3),
        }
        _say(f"  visible after {out['p50_s']} s (p50), {out['p99_s']} s (p99)")
        return out
    finally:
        collector.stop()


def _steady(stream: Stream, topic: str, seconds: float, handed: dict[int, float], done: threading.Event) -> None:
    writer = stream.writer()
    made = list(records(64, int(64 * LIVE_RECORDS_PER_S * seconds), 1_000_000, time.time()))
    began, sent, markers = time.perf_counter(), 0, 0
    while sent < len(made):
        at = time.perf_counter() - began
        while sent < min(len(made), int(at * LIVE_RECORDS_PER_S)):
            _append(writer, topic, *made[sent])
            sent += 1
        while markers < at * MARKERS_PER_S:
            events = [(Kind.STORED, 1)]
            handed[markers] = time.perf_counter()
            _append(writer, topic, MARKER, _record(MARKER, markers, time.time(), events, np.array([markers + 1], np.uint64)))
            markers += 1
        time.sleep(0.005)
    writer.close(30)
    done.set()


def _ask(data_dir: Path, sql: str) -> Any:
    try:
        connection = open_published(data_dir / FILE_NAME, threads=1)
    except PublishedError:
        return None
    try:
        row = connection.execute(sql).fetchone()
        return None if row is None else row[0]
    finally:
        connection.close()


def _kafka(command: str, root: Path) -> str:
    _say(f"Kafka: {command} ...")
    out = root / "kafka.out"
    with out.open("w") as stdout:
        done = subprocess.run([str(KAFKA), command, "--data", str(root / "kafka")], stdin=subprocess.DEVNULL, stdout=stdout, timeout=300)
    if done.returncode:
        raise SystemExit(f"kafka.sh {command} failed; see above")
    return out.read_text().strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
