import contextlib
import json
from types import SimpleNamespace

import pytest

from router.stored_responses import StoredResponses
from simulator.mock_worker import MockWorker
from simulator.settings import MockEngineSettings
from tests.router.running import running


@pytest.mark.parametrize(
    "head",
    [
        b'{"id":"resp_1","created_at":1,"output":[]}',
        b'event: response.created\ndata: {"response": {"id": "resp_1", "created_at": 1}, "type": "response.created"}\n\n',
    ],
)
def test_the_worker_that_made_a_response_is_remembered(head):
    stored = StoredResponses()
    stored.made(head, "pool", "w1")
    assert stored.worker_of("resp_1") == ("pool", "w1")


@pytest.mark.parametrize("asked", ["resp_2", "", None, 5, ["resp_1"]])
def test_nobody_is_named_for_what_was_not_seen_made(asked):
    stored = StoredResponses()
    stored.made(b'{"id":"resp_1"}', "pool", "w1")
    stored.made(b'{"error": {"message": "no", "id": "x"}}', "pool", "w2")
    assert stored.worker_of(asked) is None


def test_only_the_newest_are_kept():
    stored = StoredResponses(most=3)
    for i in range(5):
        stored.made(b'{"id":"resp_%d"}' % i, "pool", f"w{i}")
    assert [stored.worker_of(f"resp_{i}") for i in range(5)] == [None, None, ("pool", "w2"), ("pool", "w3"), ("pool", "w4")]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_belongs_to_a_response_goes_to_the_worker_that_made_it(stream):
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(MockWorker(MockEngineSettings(port=0, instant=True, model="tiny", answer_tokens=4)))
            for _ in range(3)
        ]
        named = [SimpleNamespace(name=f"w{i}", url=w.url) for i, w in enumerate(workers)]
        r = await stack.enter_async_context(running(named, policy="round_robin"))
        ask = {"model": "tiny", "input": "read the file", "stream": stream}
        for _ in range(3):
            _, headers, answer = await r.post(ask, "/v1/responses")
            text = answer.split(b"data: ", 1)[1].split(b"\n")[0] if stream else answer
            made = json.loads(text)
            id_ = (made.get("response") or made)["id"]
            for path, method in ((f"/v1/responses/{id_}", r.client.get), (f"/v1/responses/{id_}/cancel", r.client.post)):
                async with method(r.url + path) as response:
                    assert (response.status, response.headers["x-warmwatch-worker"]) == (200, headers["x-warmwatch-worker"])
            status, after, _ = await r.post({**ask, "previous_response_id": id_}, "/v1/responses")
            assert (status, after["x-warmwatch-worker"]) == (200, headers["x-warmwatch-worker"])
        async with r.client.get(r.url + "/v1/responses/resp_unknown") as response:
            assert response.status == 404
        decisions, _ = await r.records(6)
        assert [d.token_source for d in decisions] == ["exact", "text"] * 3
