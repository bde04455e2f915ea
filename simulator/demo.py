"""`warmwatch demo`: mock workers, bridge, router, agent traffic, collector and dashboard on this machine, in one command.

    mock workers --ZMQ--> bridge --+                          +--> dashboard
         ^                         v                          |
         +----- router ----> stream (local file or Kafka) --> collector --> warmwatch.duckdb
                  ^
               traffic (in this process)

Every part but the traffic is a process of its own, started as a person would start it, and stopped in an order that loses nothing: traffic,
router, bridge, workers, collector, dashboard, broker. If this process is killed the others end with it (Linux). A part that ends by itself
is told at once and makes the exit status 1. Meanwhile things go wrong by a script (incidents.py), the policy changes to round robin for a
while and back among them, so that every page has a story to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from router.policy.policies import POLICIES
from schemas.settings import Settings, SettingsError
from schemas.tables.read import FILE_NAME, PublishedError, open_published
from simulator.incidents import play, script
from simulator.live_fleet import POOL, START_LIMIT_S, Children, LiveFleet, Running, fleet_file, live_workers
from simulator.processes import Subprocess
from simulator.settings import TrafficSettings
from simulator.timing import StepCost
from simulator.traffic import RequestRecord, Traffic

KAFKA_SCRIPT = Path(__file__).parent.parent / "deploy" / "kafka" / "kafka.sh"
MARKER = ".warmwatch-demo"
SHADOWS = ("round_robin", "session_hash", "max_prefix")
"""Policies that the router asks beside the one it follows, for `warmwatch explain` and the table `shadows`."""
ACCOUNT_LIMIT_S = 30.0
STATUS_EVERY_S = 10.0
PATIENCE_S = 10.0
"""A start that takes longer is a first one on this machine, which compiles, or fetches Kafka."""
LOOK_EVERY_S = 0.5

T = TypeVar("T")
SCRIPT_S = 280.0
"""Of the incidents, in a demo without an end."""


class DemoSettings(Settings):
    """A fleet of mock workers with everything else, in one command.

    It makes its own stream and hash key: --stream, --topic-prefix, --hash-key and --hash-key-file are not used.
    """

    command: ClassVar[str] = "demo"

    data_dir: Path = Field(Path("data/demo"), description="folder of this demo; what an earlier demo left in it is removed")
    workers: int = Field(4, ge=1, le=32, description="mock workers")
    seconds: float = Field(0, ge=0, description="how long the traffic runs; 0: until Ctrl-C")
    headless: bool = Field(False, description="no dashboard")
    kafka: bool = Field(False, description="over a real Kafka broker (Java 17 and Maven) instead of the local log; sets `stream` itself")
    dashboard_port: int = Field(8501, ge=0, le=65535, description="port of the dashboard; 0 takes a free one")
    router_port: int = Field(0, ge=0, le=65535, description="port of the router; 0 takes a free one")
    sessions: int = Field(24, ge=1, description="agent sessions at the same time")
    worker_blocks: int = Field(800, ge=64, description="KV blocks of each worker (16 tokens each)")
    policy: str = Field("cost", description=f"the router's policy: {', '.join(POLICIES)}")
    compare_with: str = Field("round_robin", description="policy to change to for a while; empty: never")
    incidents: bool = Field(
        True, description="things go wrong by a script: restart, timestamp in a prompt, smaller cache, new workers, policy, lost events"
    )
    seed: int = Field(1, description="the same seed gives the same sessions")

    @field_validator("policy", "compare_with")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if value not in POLICIES and not (info.field_name == "compare_with" and not value):
            raise ValueError(f"must be one of {', '.join(POLICIES)}")
        return value


class Stopped(Exception):  # noqa: N818 - no error: a person asked for it
    """Ctrl-C while starting."""


def run(settings: DemoSettings) -> int:
    """Returns 0 when every request of the traffic is accounted for in `requests` and every part ended in good order, else 1."""
    return asyncio.run(_demo(settings))


async def _demo(settings: DemoSettings) -> int:
    stopping = asyncio.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, stopping.set)
    folder = settings.data_dir.resolve()
    children: Children = {}
    with contextlib.ExitStack() as parts:
        parts.enter_context(_emptied(folder))
        try:
            running = await asyncio.to_thread(_start, settings, folder, parts, children, stopping)
        except (Stopped, SettingsError):
            if not stopping.is_set():
                raise
            _say("stopped while starting")  # a part that the signal reached, too, may have ended by it
            return 0
        traffic = Traffic(TrafficSettings(url=running.router_url, model=POOL, sessions=settings.sessions, seed=settings.seed))
        await _run_traffic(settings, traffic, running, stopping, children)
        _say("waiting until every request is in the published database ...")
        missing, doubled = await asyncio.to_thread(unaccounted, folder / FILE_NAME, traffic.report.records)
        died = {name for name, status in children.items() if status() is not None}
        _say("stopping ...")
    print(summary(folder / FILE_NAME))
    report = traffic.report
    print(f"\n{report.sent} requests sent, {report.ok} answered, {report.failed} failed.", end=" ")
    if missing or doubled or len(report.records) != report.sent:
        print(f"NOT accounted for in `requests`: {len(missing)} missing {sorted(missing)[:5]}, {doubled} doubled.")
        return 1
    print("Every one is accounted for in `requests`.")
    unwell = {name: status() for name, status in children.items() if name in died or status() != 0}
    if unwell:
        told = ", ".join(f"{name} ({'ended by itself, ' if name in died else ''}status {status})" for name, status in unwell.items())
        print(f"NOT in good order: {told}; see {folder / 'logs'}")
        return 1
    return 0


def _start(settings: DemoSettings, folder: Path, parts: contextlib.ExitStack, children: Children, stopping: asyncio.Event) -> Running:
    """Starts everything but the traffic and notes each part in `children`. Raises Stopped between two steps when `stopping` is set."""

    def step(name: str, start: Callable[[], T]) -> T:
        if stopping.is_set():
            raise Stopped
        return _step(name, start)

    began = time.monotonic()
    logs = folder / "logs"
    key_file = folder / "hash.key"
    key_file.touch(mode=0o600)
    key_file.write_text(secrets.token_hex(16) + "\n")
    stream = f"local:{folder / 'stream.sqlite'}"
    if settings.kafka:
        stream = step("Kafka broker", lambda: parts.enter_context(_kafka(folder / "kafka")))
    common = ["--stream", stream, "--hash-key-file", str(key_file), "--log-level", settings.log_level]

    # What is entered last is stopped first: see the order above. Most of each start is imports, so they start side by side.
    dashboard = None
    if not settings.headless:
        dashboard = parts.enter_context(Subprocess("dashboard", ["--data-dir", str(folder), "--port", str(settings.dashboard_port)], logs))
    collector = parts.enter_context(Subprocess("collect", [*common, "--data-dir", str(folder), "--metrics-port", "0"], logs))
    workers = step(f"{settings.workers} mock workers", lambda: live_workers(settings.workers, settings.worker_blocks, parts))
    fleet = folder / "fleet.toml"
    fleet.write_text(fleet_file(workers))
    bridge = parts.enter_context(Subprocess("bridge", [*common, "--fleet", str(fleet), "--metrics-port", "0"], logs))
    route = [*common, "--fleet", str(fleet), "--port", str(settings.router_port), "--policy", settings.policy, "--admin-port", "0"]
    route += [part for policy in SHADOWS for part in ("--shadow-policies", policy)]
    router = parts.enter_context(Subprocess("route", [*route, *prefill_flags(StepCost())], logs))
    children |= {part.name: part.status for part in (dashboard, collector, bridge, router) if part is not None}
    children |= {f"mock worker w{i}": worker.process.poll for i, worker in enumerate(workers)}

    step("collector", lambda: collector.ready(START_LIMIT_S))
    step("bridge", lambda: bridge.ready(START_LIMIT_S))
    at = step("router", lambda: router.ready(START_LIMIT_S))
    lines = {"router": at["router"] + "/v1", "database": str(folder / FILE_NAME), "stream": stream, "logs": str(logs)}
    if dashboard is not None:
        address = step("dashboard", lambda: dashboard.ready(START_LIMIT_S))["dashboard"]
        lines = {"dashboard": f"{address}/?range=5m", **lines}
    _say(f"everything runs after {time.monotonic() - began:.0f} s")
    for name, where in lines.items():
        print(f"  {name:<10} {where}")
    command = "warmwatch" if shutil.which("warmwatch") else Path(sys.executable).with_name("warmwatch")
    print(f"  ask it     {command} sql --db {folder / FILE_NAME} 'FROM workers'")
    print(f"  explain    {command} explain --last --db {folder / FILE_NAME}", flush=True)
    return Running(at["router"], at["admin"], fleet, workers, settings.worker_blocks, stream, common, logs, parts, children)


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """The folder, empty but for our mark, which is locked while the demo runs. What an earlier demo left is removed; never what a running
    one needs, nor a folder that no demo made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = any(folder.iterdir()) and not (folder / MARKER).exists()
    except OSError as e:
        raise SettingsError(f"setting `data_dir`: {folder} cannot be used: {e.strerror}") from e
    if foreign:
        raise SettingsError(f"setting `data_dir`: {folder} is not empty and was not made by a demo; name another folder")
    with (folder / MARKER).open("a") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"setting `data_dir`: another demo runs in {folder}; stop it, or name another folder") from None
        for old in folder.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old.name != MARKER:
                old.unlink()
        yield


@contextlib.contextmanager
def _kafka(data: Path) -> Iterator[str]:
    """A broker of our own; yields its stream address."""
    if not KAFKA_SCRIPT.exists():
        raise SettingsError(f"setting `kafka`: {KAFKA_SCRIPT} is missing; the broker comes with a checkout, not with the installed package")
    start = [str(KAFKA_SCRIPT), "start", "--data", str(data), "--owner", str(os.getpid())]
    # A session of its own: Ctrl-C is ours to pass on, in order.
    started = subprocess.run(start, capture_output=True, text=True, check=False, start_new_session=True)
    try:
        if started.returncode:
            raise SettingsError(f"setting `kafka`: {started.stderr.strip()}")
        yield f"kafka://{started.stdout.split()[-1]}"
    finally:
        subprocess.run([KAFKA_SCRIPT, "stop", "--data", data], capture_output=True, check=False, start_new_session=True)


def prefill_flags(cost: StepCost) -> list[str]:
    """The mock workers' cost model as the router's coefficients."""
    return ["--prefill-a", repr(cost.prefill_token_s / cost.speed), "--prefill-b", repr(cost.prefill_attention_s / cost.speed)]


async def _run_traffic(settings: DemoSettings, traffic: Traffic, running: Running, stopping: asyncio.Event, children: Children) -> None:
    """Traffic until its time is up or `stopping`; says how it goes, and meanwhile plays the incidents."""
    seconds = settings.seconds or None
    sending = asyncio.create_task(traffic.run())
    began = time.monotonic()
    watching = asyncio.create_task(_watch(traffic, began, children))
    playing = asyncio.create_task(_play(settings, LiveFleet(running, traffic), running))
    playing.add_done_callback(_say_trouble)
    _say("traffic runs; " + (f"it ends after {seconds:.0f} s" if seconds else "Ctrl-C ends it"))
    try:
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({stopped, sending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        traffic.stop()
        await sending
    finally:
        for task in (watching, playing):
            task.cancel()
        await asyncio.gather(watching, playing, return_exceptions=True)


async def _play(settings: DemoSettings, fleet: LiveFleet, running: Running) -> None:
    """The incidents, over the demo's time or over `SCRIPT_S`; without them, `compare_with` in the middle third."""
    total_s = settings.seconds or SCRIPT_S
    if settings.incidents:
        await play(script(settings.policy, settings.compare_with), fleet, total_s, running.fleet.parent / "incidents.jsonl", _say)
    elif settings.compare_with:
        for policy in (settings.compare_with, settings.policy):
            await asyncio.sleep(total_s / 3)
            await fleet.follow(policy)
            _say(f"the router's policy is now {policy}")


def _say_trouble(playing: asyncio.Task[None]) -> None:
    if not playing.cancelled() and (error := playing.exception()) is not None:
        _say(f"an incident could not be played: {type(error).__name__}: {error}")


async def _watch(traffic: Traffic, began: float, children: Children) -> None:
    """Says every `STATUS_EVERY_S` how it goes, and at once when a part has ended by itself."""
    told: set[str] = set()
    next_s = began + STATUS_EVERY_S
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        for name, status in children.items():
            if name not in told and (ended := status()) is not None:
                told.add(name)
                _say(f"{name} ENDED by itself with status {ended}; see its log")
        if time.monotonic() < next_s:
            continue
        next_s += STATUS_EVERY_S
        report = traffic.report
        hit_rate = report.hit_rate()
        cached = "not reported yet" if hit_rate is None else f"{hit_rate:.0%}"
        _say(f"{time.monotonic() - began:4.0f} s: {report.sent} requests, {report.failed} failed, hit rate so far {cached}")


def unaccounted(database: Path, records: list[RequestRecord], limit_s: float = ACCOUNT_LIMIT_S) -> tuple[set[str], int]:
    """Waits until each of these requests has one finished row in the published file. Returns the ids still missing and the number of
    rows too many."""
    wanted = {r.request_id for r in records}
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with contextlib.closing(open_published(database)) as db:
                rows = db.execute("SELECT request_id FROM requests WHERE ended_at IS NOT NULL").fetchall()
        except PublishedError:
            rows = []
        found = [r for (r,) in rows if r in wanted]
        missing = wanted - set(found)
        if not missing or time.monotonic() > deadline:
            return missing, len(found) - len(set(found))
        time.sleep(0.2)


def summary(database: Path) -> str:
    """What the published file says: hit rate and TTFT by worker and by policy."""
    by_worker = """
        SELECT coalesce(worker, 'all workers') AS who, sum(requests), sum(cached_tokens) / nullif(sum(reported_prompt_tokens), 0),
               ttft(worker, .5, $since, $until), ttft(worker, .9, $since, $until), ttft(worker, .99, $since, $until)
        FROM worker_10s GROUP BY GROUPING SETS ((worker), ()) HAVING sum(requests) > 0 ORDER BY worker NULLS LAST"""
    by_policy = """
        SELECT 'policy ' || policy, count(*), sum(cached_tokens) / sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL),
               quantile_disc(ttft_s, .5), quantile_disc(ttft_s, .9), quantile_disc(ttft_s, .99)
        FROM requests WHERE ended_at IS NOT NULL GROUP BY ALL ORDER BY 1"""
    with contextlib.closing(open_published(database)) as db:
        ever = {"since": dt.datetime.min, "until": dt.datetime.max}
        rows = db.execute(by_worker, ever).fetchall() + db.execute(by_policy).fetchall()

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [f"{'':<20} {'requests':>8} {'hit rate':>9} {'TTFT p50':>10} {'p90':>8} {'p99':>8}"]
    for who, requests, hit, p50, p90, p99 in rows:
        times = f"{cell(p50, '.3f'):>8} s {cell(p90, '.3f'):>6} s {cell(p99, '.3f'):>6} s"
        lines.append(f"{who or 'no worker':<20} {requests:>8.0f} {cell(hit, '.1%'):>9} {times}")
    return "\n".join(lines)


def _step(name: str, start: Callable[[], T]) -> T:
    """Starts one part, saying so before and after."""
    began = time.monotonic()
    print(f"demo: starting {name} ...", end=" ", flush=True)
    slow = threading.Timer(PATIENCE_S, print, ["(the first start on a machine takes a minute or so) ..."], {"end": " ", "flush": True})
    slow.daemon = True
    slow.start()
    try:
        result = start()
    finally:
        slow.cancel()
    print(f"ready ({time.monotonic() - began:.1f} s)", flush=True)
    return result


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)
