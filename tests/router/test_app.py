"""The process: how it starts, what stops its start, and how it ends."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from router.app import Router, _serve, listen, run
from router.settings import RouterSettings
from schemas.fleet import Fleet, load_fleet
from schemas.requests import Outcome
from schemas.settings import SettingsError
from schemas.stream import open_stream
from schemas.stream.memory import MemoryHub
from schemas.topics import OUTCOMES
from tests.router.fake_engine import FakeEngine
from tests.router.running import KEY_HEX, until


def fleet_file(tmp_path, url="http://127.0.0.1:9", pool=""):
    file = tmp_path / "fleet.toml"
    file.write_text(f'[[pools]]\nname = "tiny"\n{pool}\n[[workers]]\npool = "tiny"\nname = "w0"\nurl = "{url}"\n')
    return file


def settings(tmp_path, **given):
    return RouterSettings(stream=f"local:{tmp_path}/log.sqlite", hash_key=KEY_HEX, fleet=fleet_file(tmp_path), **given)


def test_a_port_in_use_says_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"`port`: 127.0.0.1:{port} is in use.*--port"):
            run(settings(tmp_path, port=port))


def test_a_foreign_address_names_the_setting():
    with pytest.raises(SettingsError, match="`host`"), listen("192.0.2.1", 0, "port"):
        pass


def test_a_missing_tokenizer_stops_the_start(tmp_path):
    bad = settings(tmp_path)
    fleet_file(tmp_path, pool=f'tokenizer = "{tmp_path}"')
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        run(bad)


@pytest.mark.parametrize(
    ("given", "says"), [({"stream": "ftp://x"}, "`stream`"), ({"fleet": Path("/nowhere.toml")}, "fleet file /nowhere.toml")]
)
def test_bad_settings_name_their_key(tmp_path, given, says):
    with pytest.raises(SettingsError, match=says):
        run(settings(tmp_path).model_copy(update=given))


def test_an_unknown_policy_names_those_that_exist():
    with pytest.raises(ValueError, match="cost, round_robin"):
        RouterSettings(policy="best")


@contextlib.asynccontextmanager
async def process(tmp_path, url, *flags):
    """`warmwatch route` as a process; yields it and its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    args = ("--fleet", str(fleet_file(tmp_path, url)), "--port", str(port), "--stream", f"local:{tmp_path}/log.sqlite", *flags)
    code = "import sys, warmwatch; sys.exit(warmwatch.main(['route', *sys.argv[1:]]))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("WARMWATCH_")} | {"WARMWATCH_HASH_KEY": KEY_HEX}
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *args, env=env, stderr=asyncio.subprocess.PIPE)
    try:
        yield child, f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ready(client, url, child):
    for _ in range(600):
        assert child.returncode is None, (await child.stderr.read()).decode()
        with contextlib.suppress(aiohttp.ClientError):
            async with client.get(url + "/readyz") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.05)
    raise AssertionError("the router did not become ready")


def outcomes(tmp_path):
    with open_stream(f"local:{tmp_path}/log.sqlite") as stream:
        reader = stream.reader()
        reader.assign({(OUTCOMES, p): 0 for p in range(stream.partitions(OUTCOMES))})
        found = [Outcome.model_validate_json(r.value) for _ in range(4) for s in reader.poll(0.1, 100) for r in s.records]
        reader.close()
    return found


async def test_sigterm_lets_requests_end_flushes_their_records_and_exits_0(tmp_path):
    async with FakeEngine("w0").serving() as engine, aiohttp.ClientSession() as client:
        engine.gate = asyncio.Event()
        async with process(tmp_path, engine.url) as (child, url):
            await ready(client, url, child)
            asked = asyncio.create_task(client.post(url + "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}))
            await until(lambda: engine.seen)
            child.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert child.returncode is None
            async with asyncio.timeout(10):
                await child.stderr.readuntil(b"1 requests may end within ")
            engine.gate.set()
            async with await asked as response:
                assert (response.status, await response.read()) == (200, b"".join(engine.chunks))
            assert await asyncio.wait_for(child.wait(), 10) == 0
        (o,) = outcomes(tmp_path)
        assert (o.status, o.error, o.cached_tokens) == (200, None, 64)


async def test_a_request_that_outlasts_the_drain_is_cut_and_recorded(tmp_path):
    async with FakeEngine("w0").serving() as engine, aiohttp.ClientSession() as client:
        engine.gate = asyncio.Event()
        async with process(tmp_path, engine.url, "--drain-s", "0.2") as (child, url):
            await ready(client, url, child)
            asked = asyncio.create_task(client.post(url + "/v1/completions", json={"model": "tiny", "prompt": "x"}))
            await until(lambda: engine.seen)
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(aiohttp.ClientError):
                (await asked).close()
            assert await asyncio.wait_for(child.wait(), 10) == 0
        (o,) = outcomes(tmp_path)
        assert o.error == "shutdown"


async def test_no_signal_cuts_off_what_is_written_last(tmp_path, monkeypatch):
    given, handled_by = settings(tmp_path), []
    with open_stream(given.stream) as stream, listen("127.0.0.1", 0, "port") as a, listen("127.0.0.1", 0, "admin_port") as b:
        router = Router(given, load_fleet(given.fleet), {}, stream)
        close = router.close

        def closes():
            handled_by.append(signal.getsignal(signal.SIGTERM))
            close()

        monkeypatch.setattr(router, "close", closes)
        router.ending.ask()
        await _serve(router, a, b)
    assert handled_by and handled_by[0] is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_more_workers_than_can_be_followed_stop_the_start(tmp_path):
    bad = settings(tmp_path, port=0, admin_port=0)
    bad.fleet.write_text(
        bad.fleet.read_text() + "".join(f'[[workers]]\npool = "tiny"\nurl = "http://x{i}:1"\nranks = 1024\n' for i in range(4))
    )
    with pytest.raises(SettingsError, match=r"fleet\.toml: the router follows at most 4031 workers and ranks"):
        run(bad)


@pytest.mark.parametrize("keys", [("api_keys_file",), ("tls_cert_file", "tls_key_file")])
def test_what_is_wrong_in_a_file_is_told_before_kernels_are_compiled(tmp_path, monkeypatch, keys):
    monkeypatch.setattr("router.app.warm_up", lambda: pytest.fail("this takes long"))
    bad = settings(tmp_path, port=0, admin_port=0).model_copy(update=dict.fromkeys(keys, tmp_path / "none"))
    with pytest.raises(SettingsError, match=keys[0]):
        run(bad)


async def test_the_process_says_what_is_wrong_and_exits_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(tmp_path, "http://127.0.0.1:9", "--port", str(port)) as (child, _):
            _, said = await child.communicate()
    assert child.returncode == 2
    assert json.dumps(str(port))[1:-1] in said.decode()
    assert "in use" in said.decode()


async def test_a_pool_that_is_dark_is_told_and_does_not_take_the_others_away():
    pools = [{"name": "a"}, {"name": "b"}]
    workers = [{"pool": p, "url": f"http://127.0.0.1:{port}"} for p, port in (("a", 1), ("b", 2))]
    fleet = Fleet.model_validate({"pools": pools, "workers": workers})
    with MemoryHub().open("test") as stream:
        router = Router(RouterSettings(hash_key=KEY_HEX, warm_up_s=0), fleet, {}, stream)
        for dark, status in (("a", 200), ("b", 503)):
            router.pools.by_name[dark].health.refused(0)
            found, content = router.readiness()
            assert found == status
            assert any(f"no worker of {dark}" in why or f"{dark} answers" in why for why in content["why"])
