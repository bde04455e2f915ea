"""The whole bridge: HTTP discovery and load, ZeroMQ events, a stream, and the command with its signals."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from collector.bridge.app import Bridge
from collector.bridge.run import run
from collector.bridge.settings import BridgeSettings
from schemas.fleet import Fleet
from schemas.kv_events import Kind, decode
from schemas.settings import SettingsError, load
from schemas.stream import Stream, open_stream
from schemas.stream.memory import MemoryHub
from schemas.workers import Trust, WorkerLoad
from tests.collector.bridge.wire import FakeEngine, one_block, payload, stored

PAGE = gzip.decompress(
    (Path(__file__).parents[2] / "fixtures" / "vllm-0.32.0" / "a-int-hash" / "metrics_after.prom.gz").read_bytes()
).decode()
HASH_KEY = "000102030405060708090a0b0c0d0e0f"


async def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def http_engine(sources: Any = None, page: str | None = PAGE) -> AsyncIterator[str]:
    """An engine's HTTP side. sources None: an old engine that does not know the path."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=page) if page is not None else web.Response(status=500)

    async def where(_: web.Request) -> web.Response:
        return web.json_response(sources) if sources is not None else web.Response(status=404)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/kv_event_sources", where), web.get("/server_info", where)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def fleet(*workers: dict[str, Any]) -> Fleet:
    return Fleet.model_validate({"pools": [{"name": "p"}], "workers": [{"pool": "p", "name": "w", **w} for w in workers]})


def settings(**more: Any) -> BridgeSettings:
    quick = {"load_interval_s": 0.05, "discovery_interval_s": 0.1, "replay_silence_s": 0.2, "http_timeout_s": 1.0, "stop_timeout_s": 2.0}
    return BridgeSettings.model_validate({"hash_key": HASH_KEY, "stream": "memory://s", "metrics_port": 0, **quick, **more})


def values(stream: Stream, topic: str) -> list[bytes]:
    reader = stream.reader()
    try:
        reader.assign({(topic, p): o for p, o in stream.start_offsets(topic).items()})
        out: list[bytes] = []
        while slices := reader.poll(0.0, 10_000):
            out += [r.value for s in slices for r in s.records if r.value is not None]
        return out
    finally:
        reader.close()


def loads(stream: Stream) -> list[WorkerLoad]:
    return [WorkerLoad.model_validate_json(v) for v in values(stream, "worker-load")]


@asynccontextmanager
async def bridge_on(hub: MemoryHub, workers: Fleet, **more: Any) -> AsyncIterator[tuple[Bridge, Stream]]:
    with hub.open("s") as stream, hub.open("s") as reading:
        async with Bridge(settings(**more), workers, stream) as bridge:
            yield bridge, reading


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
async def test_events_are_found_through_the_engines_own_answer(engine_name: str) -> None:
    engine = FakeEngine()
    try:
        for seq in range(3):
            engine.publish(seq, one_block(seq))
        events, replay = engine.ports
        sources: dict[str, Any] = {
            "0": {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        }
        if engine_name == "sglang":
            ports = {"endpoint_port_base": events, "replay_endpoint_port_base": replay}
            sources = {"kv_events": {"publisher": "zmq", "endpoint_host": "*", **ports}}
        async with http_engine(sources) as url, bridge_on(MemoryHub(), fleet({"url": url, "engine": engine_name})) as (bridge, stream):
            await until(lambda: any(x.bridge.resident_blocks == 3 for x in (loads(stream) if bridge.load_records else [])))
            load = loads(stream)[-1]
            assert (load.up, load.capacity_blocks, load.prefix_hits_tokens) == (True, 199, 45920)
            assert (load.bridge.trust, load.bridge.seq) == (Trust.EXACT, 2)
            kinds = [int(e["kind"]) for v in values(stream, "kv-events") for e in decode(v).events]
            assert kinds == [Kind.EPOCH_STARTED, *[Kind.STORED] * 3]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{bridge.metrics_port}") as http:
                async with http.get("/readyz") as response:
                    assert response.status == 200
                    answer = await response.json()
                    assert answer["load_only"] == []
                    assert answer["workers"]["p/w/0"] == {"metrics_page": True, "events": "followed", "trust": "exact"}
                async with http.get("/healthz") as response:
                    assert response.status == 200
                async with http.get("/metrics") as response:
                    page = await response.text()
        assert 'warmwatch_bridge_resident_blocks{pool="p",rank="0",worker="w"} 3.0' in page
        assert 'warmwatch_bridge_trust{pool="p",rank="0",trust="exact",worker="w"} 1.0' in page
        assert f'warmwatch_bridge_hash_key{{key_id="{load.bridge.key_id}",pool="p",rank="0",worker="w"}} 1.0' in page
        assert 'warmwatch_bridge_frames_total{pool="p",rank="0",worker="w"}' in page
    finally:
        engine.close()


async def test_a_worker_without_events_still_gives_load_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with http_engine() as url, bridge_on(MemoryHub(), fleet({"url": url})) as (bridge, stream):
        await until(lambda: bridge.load_records > 2 and "404" in str(bridge.readiness()))
        ready, details = bridge.readiness()
        assert ready
        assert details["load_only"] == ["p/w"]
        assert "load only" in details["workers"]["p/w/0"]["events"]
        load = loads(stream)[0]
        assert (load.up, load.running, load.bridge.trust, load.bridge.seq) == (True, 0, Trust.BLIND, None)
    assert "load only" in caplog.text
    assert "--kv-events-config" in caplog.text


async def test_a_worker_that_does_not_answer_is_down_and_nothing_is_invented() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with bridge_on(MemoryHub(), fleet({"url": url})) as (bridge, stream):
            await until(lambda: bridge.readiness()[0] and bool(loads(stream)))
            load = loads(stream)[0]
    assert not load.up
    assert load.engine == "vllm"
    assert (load.running, load.waiting, load.kv_usage, load.capacity_blocks, load.prompt_tokens) == (None,) * 5


async def test_a_page_that_cannot_be_read_is_counted_and_is_no_reason_to_stop() -> None:
    async with (
        http_engine(page="vllm:num_requests_running{engine= 3\n") as url,
        bridge_on(MemoryHub(), fleet({"url": url})) as (bridge, stream),
    ):
        await until(lambda: bridge.load_records > 3)
        assert bridge.watches[0].bad_pages >= 2
        assert {(x.up, x.running) for x in loads(stream)} == {(True, None)}


async def test_the_bridge_starts_while_the_stream_is_away_and_delivers_when_it_comes() -> None:
    hub = MemoryHub()
    engine = FakeEngine()
    hub.open("s").close()
    hub.outage("s", "the broker is away")
    try:
        engine.publish(0, one_block(0))
        where = {"url": "http://127.0.0.1:9", "events": engine.events, "replay": engine.replay}
        async with bridge_on(hub, fleet(where)) as (bridge, stream):
            await until(lambda: any(h.resident_blocks for h in bridge.events.health.values()))
            assert bridge.readiness()[0] is False
            assert "away" in bridge.readiness()[1]["stream"]
            hub.heal("s")
            await until(lambda: bridge.readiness()[0] and bridge.outbox.sent > 0)
            await until(lambda: len(values(stream, "kv-events")) > 0)
    finally:
        engine.close()


async def test_a_taken_port_names_the_setting() -> None:
    with socket.socket() as taken, MemoryHub().open("s") as stream:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bridge = Bridge(settings(metrics_port=taken.getsockname()[1]), fleet({"url": "http://127.0.0.1:9"}), stream)
        with pytest.raises(SettingsError, match="metrics_port"):
            await bridge.__aenter__()


def test_wrong_settings_name_their_key(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[pools]]\nname = "p"\n[[workers]]\npool = "p"\nname = "w"\nurl = "http://127.0.0.1:9"\n')
    base = ["--hash-key", HASH_KEY, "--stream", f"local:{tmp_path / 'log'}"]

    def start(*argv: str) -> None:
        run(load(BridgeSettings, [*base, *argv]))

    with pytest.raises(SettingsError, match=r"fleet file .*missing.toml"):
        start("--fleet", str(tmp_path / "missing.toml"))
    with pytest.raises(SettingsError, match="`workers`: 'x' is not in the fleet file"):
        start("--fleet", str(file), "--workers", "x")
    with pytest.raises(SettingsError, match="`stream`"):
        start("--fleet", str(file), "--stream", "amqp://x")
    with pytest.raises(SettingsError, match="batch_ms"):
        start("--fleet", str(file), "--batch-ms", "50")
    with pytest.raises(SettingsError, match="hash_key") as error:
        start("--fleet", str(file), "--hash-key", "0123")
    assert "0123" not in str(error.value)


def test_the_command_serves_a_worker_and_sigterm_ends_it_cleanly_without_a_token_in_log_or_stream(tmp_path: Path) -> None:
    engine = FakeEngine()
    tokens = [71_234, 81_235, 91_236, 101_237]
    try:
        engine.publish(0, payload(stored([1], tokens)))
        fleet_file = tmp_path / "fleet.toml"
        fleet_file.write_text(
            '[[pools]]\nname = "p"\n[[workers]]\npool = "p"\nname = "w"\nurl = "http://127.0.0.1:9"\n'
            f'events = "{engine.events}"\nreplay = "{engine.replay}"\n'
        )
        address = f"local:{tmp_path / 'stream.sqlite'}"
        argv = [
            "bridge",
            "--fleet",
            str(fleet_file),
            "--stream",
            address,
            "--hash-key-file",
            str(tmp_path / "key"),
            "--log-level",
            "debug",
            "--metrics-port",
            "0",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "warmwatch", *argv],
            stderr=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"]}, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        try:
            with open_stream(address) as stream:
                deadline = time.monotonic() + 30
                kinds: list[int] = []
                while Kind.STORED not in kinds:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
                    if (tmp_path / "stream.sqlite").exists():
                        try:
                            kinds = [int(e["kind"]) for v in values(stream, "kv-events") for e in decode(v).events]
                        except Exception:  # the topics are still being made
                            continue
                engine.publish(1, payload(stored([2], tokens, parent=1)))
                engine.publish(2, b"\xc1" + bytes(tokens[0].to_bytes(4, "big")))
                process.send_signal(signal.SIGTERM)
                _, log = process.communicate(timeout=15)
                records = values(stream, "kv-events") + values(stream, "worker-load")
        finally:
            process.kill()
            process.wait()
    finally:
        engine.close()
    assert process.returncode == 0, log
    key = (tmp_path / "key").read_text().strip()
    blob = b"".join(records)
    for t in tokens:
        assert str(t) not in log
        assert str(t).encode() not in blob
        for width in (3, 4, 8):
            assert t.to_bytes(width, "little") not in blob
            assert t.to_bytes(width, "big") not in blob
    assert key not in log
    assert "KV events from" in log
    assert json.loads(next(r for r in records if r.startswith(b"{")))["worker"] == "w"
