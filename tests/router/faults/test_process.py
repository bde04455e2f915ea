"""The process under signals: the way to its end, and a fleet that changes while it runs."""

import asyncio
import json
import signal
import socket

import aiohttp

from tests.router.fake_engine import FakeEngine
from tests.router.running import until
from tests.router.test_app import outcomes, process, ready


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def get(client, url):
    async with client.get(url) as response:
        return response.status, json.loads(await response.read())


async def test_sigterm_turns_readiness_off_a_second_one_refuses_connections_and_streams_end(tmp_path):
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with FakeEngine("w0").serving() as engine, aiohttp.ClientSession() as client:
        engine.gate = asyncio.Event()
        async with process(tmp_path, engine.url, "--drain-delay-s", "3600", "--admin-port", "0") as (child, url):
            await ready(client, url, child)
            before = asyncio.create_task(client.post(url + "/v1/completions", json=body))
            await until(lambda: engine.seen)
            child.send_signal(signal.SIGTERM)
            for _ in range(1000):
                status, content = await get(client, url + "/readyz")
                if status == 503:
                    break
                await asyncio.sleep(0.005)
            assert content["why"] == ["the router is about to end"]
            during = asyncio.create_task(client.post(url + "/v1/completions", json=body))  # the balancer has not looked yet
            await until(lambda: len(engine.seen) == 2)
            child.send_signal(signal.SIGTERM)
            refused = None
            for _ in range(1000):
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                    writer.close()
                    await writer.wait_closed()
                except OSError as e:
                    refused = e
                    break
                await asyncio.sleep(0.01)
            assert isinstance(refused, ConnectionRefusedError)
            assert child.returncode is None
            engine.gate.set()
            for asked in (before, during):
                async with await asked as response:
                    assert (response.status, await response.read()) == (200, b"".join(engine.chunks))
            assert await asyncio.wait_for(child.wait(), 15) == 0
        assert [(o.status, o.error) for o in outcomes(tmp_path)] == [(200, None)] * 2


async def test_a_fleet_changes_by_its_file_a_signal_and_the_admin_port(tmp_path):
    admin = f"http://127.0.0.1:{free_port()}"
    file = tmp_path / "fleet.toml"
    one = '[[workers]]\npool = "tiny"\nname = "{0}"\nurl = "{1}"\n'

    def write(text):
        draft = tmp_path / "draft.toml"
        draft.write_text('[[pools]]\nname = "tiny"\n' + text)
        draft.replace(file)

    async with FakeEngine("w0").serving() as w0, FakeEngine("w1").serving() as w1, aiohttp.ClientSession() as client:
        flags = ("--admin-port", admin.rsplit(":", 1)[1], "--watch-fleet-s", "0.05")
        async with process(tmp_path, w0.url, *flags) as (child, url):
            await ready(client, url, child)

            async def workers():
                return {w["name"]: w for w in (await get(client, admin + "/workers"))[1]["pools"]["tiny"]["workers"]}

            async def until_workers(*names):
                for _ in range(1000):
                    if [*await workers()] == [*names]:
                        return
                    await asyncio.sleep(0.01)
                raise AssertionError(await workers())

            assert [(w["source"], w["state"]) for w in (await workers()).values()] == [("fleet file", "up")]
            write(one.format("w0", w0.url) + one.format("w1", w1.url))
            await until_workers("w0", "w1")
            write("[[")
            for _ in range(1000):
                status, content = await get(client, url + "/readyz")
                if content["why"]:
                    break
                await asyncio.sleep(0.01)
            assert (status, len(content["why"]), "the fleet stays as it was" in content["why"][0]) == (200, 1, True)
            async with client.get(url + "/metrics") as response:
                page = await response.text()
                assert 'warmwatch_router_membership_trouble{source="fleet file"} 1.0' in page
                assert "warmwatch_router_membership_failures_total 1.0" in page
            write(one.format("w1", w1.url))
            child.send_signal(signal.SIGHUP)
            await until_workers("w1")
            async with client.post(admin + "/workers", json={"pool": "tiny", "name": "more", "url": w0.url}) as response:
                assert response.status == 200
            async with client.post(admin + "/workers/tiny/w1/drain") as response:
                assert response.status == 200
            await until_workers("more")
            async with client.post(url + "/v1/completions", json={"model": "tiny", "prompt": "x"}) as response:
                assert (response.status, await response.text(), response.headers.get("x-warmwatch-worker"))[::2] == (200, "more")
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 15) == 0
