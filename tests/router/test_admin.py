"""The admin endpoints: the policy is told and changed, and wrong bodies say what would be right."""

import random

import orjson
import pytest

from router.admin import Admin
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from schemas.block_hash import HashKey
from schemas.changes import Change
from schemas.fleet import Fleet


@pytest.fixture
def pools():
    fleet = Fleet.model_validate(
        {"pools": [{"name": "a"}, {"name": "b"}], "workers": [{"pool": p, "url": f"http://127.0.0.1:{n}"} for p, n in (("a", 1), ("b", 2))]}
    )
    return Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(0))


class Written:
    """The recorder's one method that the admin endpoints use."""

    def __init__(self):
        self.changes = []

    def change(self, kind, record):
        self.changes.append((kind, Change.model_validate_json(record)))


async def call(pools, method, path, body=b"", written=None, headers=()):
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await Admin(pools, written or Written(), "r1")({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], orjson.loads(sent[1]["body"])


async def test_the_policy_changes_in_one_pool_or_in_all(pools):
    assert (await call(pools, "GET", "/policy"))[1]["pools"] == {"a": "cost", "b": "cost"}
    await call(pools, "POST", "/policy", b'{"policy": "round_robin", "pool": "b"}')
    assert (await call(pools, "GET", "/policy"))[1]["pools"] == {"a": "cost", "b": "round_robin"}
    status, content = await call(pools, "POST", "/policy", b'{"policy": "random"}')
    assert status == 200
    assert content["pools"] == {"a": "random", "b": "random"}


async def test_a_change_is_written_once_to_the_stream(pools):
    written = Written()
    for _ in range(2):
        await call(pools, "POST", "/policy", b'{"policy": "round_robin", "pool": "b"}', written)
    ((kind, change),) = written.changes
    assert kind == change.kind == "policy"
    assert (change.pool, change.author) == ("b", "r1")
    assert change.text == "the policy of r1 is round_robin, no longer cost"


async def test_a_web_page_cannot_change_the_policy(pools):
    status, _ = await call(pools, "POST", "/policy", b'{"policy": "random"}', headers=[(b"origin", b"https://example.org")])
    assert (status, {p.policy.name for p in pools}) == (403, {"cost"})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/policy", b"{", 400, "unexpected end"),
        ("POST", "/policy", b"[]", 400, "round_robin"),
        ("POST", "/policy", b'{"policy": "best"}', 400, "one of"),
        ("POST", "/policy", b'{"policy": ["cost"]}', 400, "one of"),
        ("POST", "/policy", b'{"policy": "cost", "pool": {}}', 400, "there are a, b"),
        ("POST", "/policy", b'{"policy": "cost", "pool": "c"}', 400, "there are a, b"),
        ("POST", "/policy", b" " * 70_000, 413, "over 65536 bytes"),
        ("DELETE", "/policy", b"", 404, "GET /policy"),
        ("GET", "/secrets", b"", 404, "GET /policy"),
    ],
)
async def test_what_is_wrong_is_said_and_changes_nothing(pools, method, path, body, status, says):
    got, content = await call(pools, method, path, body)
    assert got == status
    assert says in content["error"]["message"]
    assert {p.policy.name for p in pools} == {"cost"}
