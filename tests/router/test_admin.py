"""The admin endpoints: policy and workers are told and changed, and wrong bodies say what would be right."""

import random

import orjson
import pytest

from router.admin import Admin
from router.http.usage import Usage
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from router.workers.membership import Membership
from schemas.block_hash import HashKey
from schemas.changes import Change
from schemas.fleet import Fleet

FLEET = Fleet.model_validate(
    {"pools": [{"name": "a"}, {"name": "b"}], "workers": [{"pool": p, "url": f"http://127.0.0.1:{n}"} for p, n in (("a", 1), ("b", 2))]}
)


@pytest.fixture
def pools():
    return Pools(FLEET, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(0))


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

    written = written or Written()
    if not hasattr(pools, "membership"):
        pools.membership = Membership(FLEET, pools, written, "r1", 10.0)
    await Admin(pools, written, "r1", pools.membership)({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
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


async def test_shadows_are_set_told_and_ended(pools):
    written = Written()
    status, content = await call(pools, "POST", "/shadows", b'{"policies": ["random", "max_prefix"], "pool": "b"}', written)
    assert status == 200
    assert [s["policy"] for s in content["pools"]["b"]] == ["random", "max_prefix"]
    assert content["pools"]["a"] == []
    pools.decide(pools.by_name["b"], Prompt.unknown(100), set(), 0.0)
    of_b = (await call(pools, "GET", "/shadows"))[1]["pools"]["b"]
    assert [(s["decisions"], s["agreed"], s["errors"]) for s in of_b] == [(1, 1, 0)] * 2
    assert (await call(pools, "POST", "/shadows", b'{"policies": []}', written))[1]["pools"] == {"a": [], "b": []}
    assert written.changes[0][1].text == "the shadow policies of r1 are random, max_prefix"


async def test_coefficients_are_told_and_adopted(pools):
    pool, book = pools.by_name["a"], pools.book
    for i in range(1, 200):
        decided = pools.decide(pool, Prompt.unknown(100), set(), 0.0)
        pools.learn(decided, Usage(prompt_tokens=100 * i, cached_tokens=0), ttft_s=100 * i * 3e-3)
    book.look(book.entry("a", None))
    (told,) = [c for c in (await call(pools, "GET", "/coefficients"))[1]["coefficients"] if c["pool"] == "a"]
    assert (told["in_use"], told["observations"]) == ("configured-1", 199)
    fit = told["versions"][1]
    assert fit["a"] == pytest.approx(3e-3, rel=0.01)
    written = Written()
    for _ in range(2):
        body = orjson.dumps({"pool": "a", "hardware": None, "version": fit["version"]})
        assert (await call(pools, "POST", "/coefficients", body, written))[0] == 200
    assert book.in_use("a", None).name == fit["version"]
    ((_, change),) = written.changes
    assert change.text == f"the prefill coefficients of r1 are {fit['version']}, no longer configured-1"


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
        ("POST", "/shadows", b"[]", 400, "a list of cost, round_robin"),
        ("POST", "/shadows", b'{"policies": "cost"}', 400, "a list of"),
        ("POST", "/shadows", b'{"policies": ["best"]}', 400, "a list of"),
        ("POST", "/shadows", b'{"policies": ["cost", "cost"]}', 400, "each once"),
        ("POST", "/shadows", b'{"policies": ["cost"], "pool": "c"}', 400, "there are a, b"),
        ("POST", "/coefficients", b'{"pool": "a"}', 400, "GET /coefficients"),
        (
            "POST",
            "/coefficients",
            b'{"pool": "a", "hardware": null, "version": "fit-9"}',
            400,
            "there are configured-1",
        ),
        ("POST", "/coefficients", b'{"pool": "a", "hardware": "h9", "version": "fit-9"}', 400, "there are a/no label"),
        ("DELETE", "/policy", b"", 404, "GET and POST /policy"),
        ("GET", "/secrets", b"", 404, "GET and POST /policy, /shadows, /coefficients and /workers"),
        ("GET", "/workers/b/127.0.0.1:2", b"", 404, "DELETE /workers/POOL/NAME"),
        ("POST", "/workers/b/127.0.0.1:2/restart", b"", 404, "drain, undrain or remove"),
        ("PUT", "/workers", b"{}", 404, "DELETE /workers/POOL/NAME"),
        ("POST", "/workers", b"{", 400, "unexpected end"),
        ("POST", "/workers", b'{"pool": "a"}', 400, "setting `url`: Field required"),
        ("POST", "/workers", b'{"pool": "a", "url": "gpu:1"}', 400, "`url`: must be an http:// or https://"),
        ("POST", "/workers", b'{"pool": "a", "url": "http://gpu:1", "rank": 2}', 400, "'rank' is not known here; there are pool, name"),
        ("POST", "/workers", b'{"pool": "c", "url": "http://gpu:1"}', 400, "there is no pool 'c'; there are a, b"),
        ("POST", "/workers", b'{"pool": "a", "url": "http://127.0.0.1:1"}', 400, "has 127.0.0.1:1 at http://127.0.0.1:1 already"),
        ("POST", "/workers/a/x/drain", b"", 400, "the pool a has no worker 'x'; it has 127.0.0.1:1"),
        ("DELETE", "/workers/c/x", b"", 400, "there is no pool 'c'"),
    ],
)
async def test_what_is_wrong_is_said_and_changes_nothing(pools, method, path, body, status, says):
    got, content = await call(pools, method, path, body)
    assert got == status
    assert says in content["error"]["message"]
    assert {p.policy.name for p in pools} == {"cost"}
    assert [p.present.tolist() for p in pools] == [[True], [True]]


async def test_workers_are_told_added_drained_and_removed(pools):
    written = Written()
    pools.membership = Membership(FLEET, pools, written, "r1", 10.0)
    status, content = await call(pools, "POST", "/workers", b'{"pool": "a", "name": "new", "url": "http://gpu:1", "ranks": 2}')
    assert (status, [w["name"] for w in content["pools"]["a"]["workers"]]) == (200, ["127.0.0.1:1", "new"])
    assert content["pools"]["a"]["workers"][1] == {
        "name": "new", "url": "http://gpu:1", "engine": "vllm", "ranks": 2, "hardware": None, "source": "admin", "state": "up",
        "draining": False, "in_flight": 0,
    }  # fmt: skip
    pools.by_name["a"].health.refused(1)
    await call(pools, "POST", "/workers/a/new/drain")
    told = (await call(pools, "GET", "/workers"))[1]["pools"]["a"]["workers"][1]
    assert (told["state"], told["draining"]) == ("unreachable", True)
    _, content = await call(pools, "POST", "/workers/a/127.0.0.1:1/remove")
    assert ([w["name"] for w in content["pools"]["a"]["workers"]], content["pools"]["a"]["removed"]) == (["new"], ["127.0.0.1:1"])
    _, content = await call(pools, "POST", "/workers/a/127.0.0.1:1/undrain")
    assert content["pools"]["a"]["removed"] == []
    await call(pools, "DELETE", "/workers/a/new")
    assert [t.worker for t in pools.by_name["a"].here()] == ["127.0.0.1:1"]
    assert [(kind, c.pool, c.worker) for kind, c in written.changes] == [
        ("scale", "a", name) for name in ("new", "new", "127.0.0.1:1", "127.0.0.1:1", "new")
    ]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/workers"), ("POST", "/workers/a/127.0.0.1:1/drain"), ("DELETE", "/workers/a/127.0.0.1:1")]
)
async def test_a_web_page_cannot_change_the_workers(pools, method, path):
    status, _ = await call(pools, method, path, b"{}", headers=[(b"origin", b"null")])
    assert (status, pools.by_name["a"].draining.any(), pools.by_name["a"].present.all()) == (403, False, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/policy", b'{"policy": "round_robin", "pools": "b"}'),
        ("/shadows", b'{"policies": [], "pols": "b"}'),
        ("/coefficients", b'{"pool": "a", "hardwares": "h100", "version": "configured-1"}'),
    ],
)
async def test_a_slip_in_a_key_changes_nothing(pools, path, body):
    status, content = await call(pools, "POST", path, body)
    assert status == 400
    assert "is not known here; there are" in content["error"]["message"]
    assert (await call(pools, "GET", "/policy"))[1]["pools"] == {"a": "cost", "b": "cost"}
