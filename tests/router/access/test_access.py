"""A whole router with keys, over real sockets and with real clients: who is let in, what they meet, and that no secret gets out."""

import asyncio
import contextlib
import hashlib
import logging
import socket
import ssl
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest

from router.http.server import Server
from router.pools import Pools
from schemas.stream.memory import MemoryHub
from schemas.topics import CHANGES, DECISIONS, OUTCOMES
from tests.router.fake_engine import FakeEngine
from tests.router.running import KEY_HEX, running, until

KEY, LIMITED, NARROW, STRANGER = "ww-key-of-ci", "ww-key-with-limits", "ww-key-for-models", "ww-key-of-nobody"
TLS = Path(__file__).parents[2] / "fixtures" / "tls"
BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def entry(name, key, more=""):
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{more}\n'


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("ci", KEY, 'tenant = "team-a"')
        + entry("limited", LIMITED, "requests_per_minute = 2\ntokens_per_minute = 1000")
        + entry("narrow", NARROW, 'models = ["tiny"]')
    )
    return path


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def clients(url, key):
    return (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0),
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0),
    )


@contextlib.asynccontextmanager
async def engines_and_router(keys=None, names=("w0",), **settings):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(name).serving()) for name in names]
        router = await stack.enter_async_context(running(engines, api_keys_file=keys, **settings))
        yield engines, router


async def test_real_clients_raise_their_own_errors(keys):
    async with engines_and_router(keys) as (_, r), contextlib.AsyncExitStack() as stack:

        async def asked(key):
            by_openai, by_anthropic = clients(r.url, key)
            await stack.enter_async_context(by_openai)
            await stack.enter_async_context(by_anthropic)

            def chat(model="tiny"):
                return by_openai.chat.completions.create(messages=CHAT["messages"], model=model)

            def message(model="tiny"):
                return by_anthropic.messages.create(messages=CHAT["messages"], model=model, max_tokens=3)

            return chat, message

        chat, message = await asked(STRANGER)
        with pytest.raises(openai.AuthenticationError, match="API key") as e:
            await chat()
        assert (e.value.code, e.value.type) == ("invalid_api_key", "invalid_request_error")
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await message()

        chat, message = await asked(NARROW)
        await chat()
        with pytest.raises(openai.PermissionDeniedError, match="not for the model `other`"):
            await chat("other")
        with pytest.raises(anthropic.PermissionDeniedError, match="permission_error"):
            await message("other")

        chat, message = await asked(LIMITED)
        await chat()
        await chat()
        with pytest.raises(openai.RateLimitError, match="requests a minute") as e:
            await chat()
        assert 0 < int(e.value.response.headers["retry-after"]) <= 30
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
            await message()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "tiny"}', 418),  # the engine's own answer
        (b"", 418),
        (b'{"model": "other"}', 403),
        (b'\xef\xbb\xbf{"model": "other"}', 403),  # engines read this and the next as JSON
        ('{"model": "other"}'.encode("utf-16"), 403),
        (b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nother\r\n--x--\r\n', 403),
    ],
)
async def test_a_key_for_some_models_gets_no_other_by_a_path_or_body_that_the_router_does_not_read(keys, body, status):
    async with engines_and_router(keys) as (engines, r):
        assert (await r.post(body, "/invocations", **bearer(NARROW)))[0] == status
        assert (await r.post(body, "/invocations", **bearer(KEY)))[0] == 418
        assert len([s for s in engines[0].seen if s.path == "/invocations"]) == 1 + (status == 418)


async def test_the_tenant_is_the_keys_whatever_the_client_says(keys):
    async with engines_and_router(keys) as (_, r):
        status, headers, _ = await r.post(BODY, x_warmwatch_tenant="team-b", **bearer(KEY))
        assert status == 200
        assert "x-ratelimit-limit-requests" not in headers  # it has none
        decisions, _ = await r.records()
        assert decisions[0].tenant == "team-a"


async def test_answers_tell_what_is_left_and_tokens_are_counted_by_the_prompt(keys):
    async with engines_and_router(keys) as (_, r):
        status, headers, _ = await r.post({**BODY, "prompt": [1] * 400}, **bearer(LIMITED))
        assert status == 200
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert 600 <= int(headers["x-ratelimit-remaining-tokens"]) <= 610
        assert (await r.post({**BODY, "prompt": [1] * 1200}, **bearer(LIMITED)))[0] == 200
        status, headers, _ = await r.post(BODY, x_request_id="mine", **bearer(LIMITED))
        assert (status, headers["x-request-id"]) == (429, "mine")


async def test_over_its_tokens_a_request_is_refused_after_its_prompt_was_read_and_recorded_so(keys):
    async with engines_and_router(keys) as (_, r):
        gate = r.router.gate
        long = r.post({**BODY, "prompt": [1] * 1200}, **bearer(LIMITED))
        again = r.post({**BODY, "prompt": [1] * 1200}, x_request_id="mine", **bearer(LIMITED))
        answers = await asyncio.gather(long, again)
        assert sorted(a[0] for a in answers) == [200, 429]
        assert gate.tokens["limited"] == 1200
        await until(lambda: gate.in_flight["limited"] == 0)


async def test_a_refused_request_is_never_read_nor_sent(keys):
    async with engines_and_router(keys) as (engines, r):
        for headers in ({}, bearer(STRANGER), {"x-api-key": STRANGER}):
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/version", "/metrics"):
                status, told, _ = await r.post(BODY, path, **headers)
                assert (status, told["www-authenticate"]) == (401, "Bearer")
        assert [s for s in engines[0].seen if s.path != "/metrics"] == []
        page = r.router.metrics.page().decode()
        assert 'warmwatch_router_rejected_total{reason="no_key",status="401"} 6.0' in page
        assert r.values(OUTCOMES) == []


async def test_a_key_taken_out_is_refused_and_what_runs_ends(keys):
    async with engines_and_router(keys) as (engines, r):
        engines[0].gate = asyncio.Event()
        running_one = asyncio.create_task(r.post(BODY, **bearer(KEY)))
        await until(lambda: engines[0].seen)
        keys.write_text(entry("other", STRANGER))
        await until(lambda: r.router.gate.in_flight == {})
        assert (await r.post(BODY, **bearer(KEY)))[0] == 401
        engines[0].gate.set()
        assert (await running_one)[0] == 200
        assert (await r.post(BODY, **bearer(STRANGER)))[0] == 200


async def get(r, path, **headers):
    async with r.client.get(r.url + path, headers=headers) as response:
        return response.status, await response.text()


async def test_what_is_open_tells_little(keys):
    async with engines_and_router(keys) as (_, r):
        assert await get(r, "/healthz") == (200, "ok\n")
        assert await get(r, "/readyz") == (200, '{"ready":true}')
        assert "tiny" in (await get(r, "/readyz", **bearer(KEY)))[1]
        assert (await get(r, "/metrics"))[0] == 401
        assert 'warmwatch_router_refused_total{reason="no_key"} 1.0' in (await get(r, "/metrics", **bearer(KEY)))[1]
    async with engines_and_router(keys, open_metrics=True) as (_, r):
        assert (await get(r, "/metrics"))[0] == 200


async def test_the_list_of_models_is_what_the_key_may_use(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(entry("all", KEY) + entry("other", NARROW, 'models = ["something else"]'))
    async with engines_and_router(path) as (_, r):
        assert '"tiny"' in (await get(r, "/v1/models", **bearer(KEY)))[1]
        assert '"tiny"' not in (await get(r, "/v1/models", **bearer(NARROW)))[1]


@pytest.mark.parametrize(
    ("has_keys", "settings", "seen"),
    [
        (False, {}, f"Bearer {KEY}"),
        (True, {}, None),
        (True, {"forward_credentials": True}, f"Bearer {KEY}"),
        (False, {"forward_credentials": False}, None),
        (True, {"upstream_api_key": "engine-secret"}, "Bearer engine-secret"),
        (False, {"upstream_api_key": "engine-secret"}, "Bearer engine-secret"),
    ],
)
async def test_the_engine_gets_the_credentials_that_are_meant_for_it(keys, has_keys, settings, seen):
    async with engines_and_router(keys if has_keys else None, **settings) as (engines, r):
        for path in ("/v1/completions", "/some/other/path"):
            await r.post(BODY, path, **bearer(KEY), **{"x-api-key": KEY})
            headers = engines[0].seen[-1].headers
            assert headers.get("authorization") == seen
            assert headers.get("x-api-key") == (KEY if seen == f"Bearer {KEY}" else None)


async def test_the_engines_key_goes_with_questions_of_the_routers_own(keys):
    async with engines_and_router(keys, tokenizer=False, upstream_api_key="engine-secret") as (engines, r):
        engines[0].tokens = list(range(40))
        await r.post(BODY, **bearer(KEY))
        (asked,) = (s for s in engines[0].seen if s.path == "/tokenize")
        assert asked.headers["authorization"] == "Bearer engine-secret"


async def test_https_with_a_certificate_that_is_renewed(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"

    def put(name):
        cert.write_bytes((TLS / f"{name}.pem").read_bytes())
        key.write_bytes((TLS / f"{name}.key").read_bytes())

    put("first")
    async with engines_and_router(tls_cert_file=cert, tls_key_file=key) as (engines, r):
        url = r.url.replace("http://", "https://")
        engines[0].chunks = [b"data: x\n\n"] * 5

        async def ask(name):
            trusting = ssl.create_default_context(cafile=TLS / f"{name}.pem")
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client,
                client.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response,
            ):
                return response.status, await response.read()

        assert await ask("first") == (200, b"data: x\n\n" * 5)
        put("second")

        async def met():
            with contextlib.suppress(aiohttp.ClientConnectorCertificateError):
                return (await ask("second"))[0] == 200

        async with asyncio.timeout(20):
            while not await met():  # noqa: ASYNC110 - each look is a connection
                await asyncio.sleep(0.05)
        with pytest.raises((aiohttp.ClientConnectionError, OSError)):
            await r.post(BODY)  # plain HTTP is not spoken there


async def test_no_secret_gets_out(keys, monkeypatch, caplog):
    """A router with everything that is secret, through what may go wrong; then all that it has told is searched."""
    caplog.set_level(logging.DEBUG)
    secrets = {KEY, LIMITED, NARROW, STRANGER, "engine-secret", KEY_HEX, *(hashlib.sha256(k.encode()).hexdigest() for k in (KEY, LIMITED))}
    told, hub = [], MemoryHub()
    settings = {"upstream_api_key": "engine-secret", "attempts": 2, "tokenizer": False}
    async with engines_and_router(keys, ("w0", "w1"), hub=hub, **settings) as (engines, r):
        told.append(repr(r.router.settings))
        told.append(repr(vars(r.router)))

        async def ask(path="/v1/completions", body=BODY, key=KEY, **headers):
            with contextlib.suppress(aiohttp.ClientError):
                status, headers, content = await r.post(body, path, **bearer(key), **headers)
                told.append(f"{status} {headers} {content!r}")

        for key in (KEY, NARROW, STRANGER, LIMITED, LIMITED, LIMITED):
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/some/other/path"):
                await ask(path, key=key)
        await ask(body=b"not json")
        await ask(body={**BODY, "model": "other"}, key=NARROW)
        for engine in engines:
            engine.status = 500
        await ask()
        for engine in engines:
            engine.status, engine.break_after = 200, 1
        await ask(body={**BODY, "stream": True})
        with monkeypatch.context() as patch:
            patch.setattr(Pools, "decide", lambda *_, **__: 1 / 0)
            await ask()
        keys.write_text("broken")
        await until(lambda: r.router.gate.trouble)
        told += [(await get(r, path, **bearer(KEY)))[1] for path in ("/readyz", "/metrics", "/v1/models")]
        admin = Server(r.router.admin())
        listener = socket.create_server(("127.0.0.1", 0))
        await admin.start(listener)
        at = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for path in ("/policy", "/workers", "/metrics", "/other"):
            async with r.client.get(at + path) as response:
                told.append(await response.text())
        await admin.drain(0)
        listener.close()
        for topic in (DECISIONS, OUTCOMES, CHANGES):
            told += [v.decode() for v in r.values(topic)]
    told += [f"{record.getMessage()} {record.exc_text}" for record in caplog.records]
    everything = "\n".join(told)
    assert len(caplog.records) > 5
    assert "warmwatch_router_key_requests_total" in everything
    assert [s for s in secrets if s in everything] == []
