"""Records from end to end: mock workers, bridge, router and collector as processes; what was forecast, recorded, published and explained.

The fleet file names no replay addresses, so a KV event that a worker does not send is lost for good.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from schemas.tables.read import FILE_NAME, PublishedError, open_published
from simulator.demo import POOL, fleet_file, prefill_flags
from simulator.mock_worker import MockWorkerProcess, start_workers
from simulator.processes import Subprocess
from simulator.settings import MockEngineSettings
from simulator.timing import StepCost
from warmwatch import main

LIMIT_S = 60.0
WORDS = 40  # of one part of a prompt: a few blocks
T = TypeVar("T")


def until(look: Callable[[], T], what: str) -> T:
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"{what} did not come true in time"
        time.sleep(0.05)
    return found


@dataclass(frozen=True)
class Answer:
    """Of one request: what its headers said of the decision, and what the engine reported."""

    request_id: str
    worker: str
    forecast: int
    prompt: int
    cached: int


@dataclass(frozen=True)
class Fleet:
    url: str
    folder: Path
    workers: dict[str, MockWorkerProcess]

    def ask(self, prompt: str) -> Answer:
        with _complete(self.url, prompt) as response:
            usage, head = json.load(response)["usage"], response.headers
        return Answer(
            head["x-warmwatch-request-id"], head["x-warmwatch-worker"], int(head["x-warmwatch-predicted-cached-tokens"]),
            usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
        )  # fmt: skip

    def simulate(self, worker: str, what: str, **how: int) -> None:
        request = urllib.request.Request(f"{self.workers[worker].url}/_sim/{what}", json.dumps(how).encode(), method="POST")
        urllib.request.urlopen(request, timeout=LIMIT_S).close()

    def rows(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with closing(open_published(self.folder / FILE_NAME)) as db:
                return db.execute(question, list(values)).fetchall()
        except PublishedError:
            return []

    def ended(self, request_id: str) -> None:
        """Waits until the request's row is published with its end."""
        question = "SELECT 1 FROM requests WHERE request_id = ? AND ended_at IS NOT NULL"
        until(lambda: self.rows(question, request_id), f"the row of {request_id}")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("records")
    (folder / "hash.key").write_text(secrets.token_hex(16) + "\n")
    common = ["--stream", f"local:{folder / 'stream.sqlite'}", "--hash-key-file", str(folder / "hash.key")]
    with ExitStack() as parts:

        def start(name: str, *arguments: str) -> Subprocess:
            return parts.enter_context(Subprocess(name, [*common, *arguments], folder / "logs"))

        collector = start("collect", "--data-dir", str(folder), "--metrics-port", "0", "--publish-interval-s", "0.3")
        workers = start_workers(2, MockEngineSettings(port=0, model=POOL, num_gpu_blocks=4000), LIMIT_S)
        for worker in workers:
            parts.callback(worker.stop)
        file = folder / "fleet.toml"
        file.write_text("".join(line + "\n" for line in fleet_file(workers).splitlines() if not line.startswith("replay")))
        bridge = start("bridge", "--fleet", str(file), "--metrics-port", "0")
        shadows = ["--shadow-policies", "round_robin", "--shadow-policies", "max_prefix"]
        router = start("route", "--fleet", str(file), "--port", "0", "--admin-port", "0", *shadows, *prefill_flags(StepCost()))
        for part in (collector, bridge):
            part.ready(LIMIT_S)
        made = Fleet(router.ready(LIMIT_S)["router"], folder, {f"w{i}": w for i, w in enumerate(workers)})
        for worker in workers:  # an index is exact from its worker's first event on
            _complete(worker.url, f"hello {worker.url}").close()
        until(lambda: _exact_workers(made.url) == len(workers), "exact indexes")
        yield made


def _complete(url: str, prompt: str) -> Any:
    body = json.dumps({"model": POOL, "prompt": prompt, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=LIMIT_S)


def _exact_workers(router_url: str) -> int:
    with urllib.request.urlopen(f"{router_url}/metrics", timeout=LIMIT_S) as page:
        lines = page.read().decode().splitlines()
    return sum(line.startswith("warmwatch_router_worker_trust{") and line.endswith(" 1.0") for line in lines)


def conversation(name: str, turns: int) -> list[str]:
    """Prompts that grow: each begins with the one before."""
    parts = [" ".join(f"{name} says {turn} and {i}" for i in range(WORDS)) for turn in range(turns)]
    return ["\n".join(parts[: i + 1]) for i in range(turns)]


def test_what_is_forecast_at_dispatch_is_what_the_engine_reports(fleet: Fleet) -> None:
    """Requests one after the other: all. Side by side: all but races."""
    answers = [fleet.ask(p) for p in [*conversation("ada", 6), *conversation("ada", 3), *conversation("bob", 4)]]
    assert [a.forecast for a in answers] == [a.cached for a in answers]
    assert sum(a.cached > 0 for a in answers) >= 10
    with ThreadPoolExecutor(4) as agents:
        lines = agents.map(lambda name: [fleet.ask(p) for p in conversation(name, 6)], ["cid", "dan", "eve", "fay"])
        together = [a for line in lines for a in line]
    assert sum(a.forecast == a.cached for a in together) >= 0.9 * len(together)
    for a in (*answers, *together):
        fleet.ended(a.request_id)
    found = dict(fleet.rows("SELECT request_id, predicted_tokens FROM requests"))
    assert [found[a.request_id] for a in (*answers, *together)] == [a.forecast for a in (*answers, *together)]


def test_each_decision_says_what_other_policies_would_have_done(fleet: Fleet) -> None:
    *_, last = [fleet.ask(p) for p in conversation("gil", 3)]
    fleet.ended(last.request_id)
    picks = fleet.rows("SELECT policy, same, predicted_tokens, chosen_predicted_tokens FROM shadows WHERE request_id = ?", last.request_id)
    by_policy = {policy: (same, tokens, chosen) for policy, same, tokens, chosen in picks}
    assert set(by_policy) == {"round_robin", "max_prefix"}
    assert by_policy["max_prefix"] == (True, last.forecast, last.forecast)
    assert by_policy["round_robin"][1] in (0, last.forecast)


def test_a_request_that_was_sent_again_is_explained_with_its_attempts(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = conversation("hal", 2)
    asked = fleet.ask(first)
    holder = asked.worker
    until(
        lambda: fleet.rows("SELECT 1 FROM requests WHERE request_id = ? AND event_hit_tokens IS NOT NULL", asked.request_id), "its events"
    )
    fleet.simulate(holder, "fail", status=503, requests=1)
    answer = fleet.ask(second)
    assert answer.worker != holder
    fleet.ended(answer.request_id)
    assert main(["explain", answer.request_id, "--data-dir", str(fleet.folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Decision: {answer.worker}" in text
    assert f"1. {holder} after" in text
    assert "status: the worker said 503" in text
    assert f"{holder} held" in text
    assert "but could not be chosen: it had been tried before." in text
    assert "1 retry" in text


def test_a_dropped_event_makes_the_worker_degraded_and_record_and_explain_say_so(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """The last test of this fleet: the worker stays degraded."""
    turns = iter(conversation("ivy", 400))
    worker = fleet.ask(next(turns)).worker
    fleet.simulate(worker, "drop_events", batches=1)

    def trust_of_the_next() -> str | None:
        """Asks once more; its id when it was decided by an index that is not exact."""
        answer = fleet.ask(next(turns))
        fleet.ended(answer.request_id)
        question = "SELECT trust FROM candidates WHERE request_id = ? AND worker = ?"
        ((trust,),) = fleet.rows(question, answer.request_id, worker)
        return answer.request_id if trust == "degraded" and answer.worker == worker else None

    request_id = until(trust_of_the_next, "degraded")
    until(lambda: fleet.rows("SELECT 1 FROM workers WHERE worker = ? AND trust = 'degraded'", worker), "the workers table")
    assert main(["explain", request_id, "--data-dir", str(fleet.folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"The index of {worker} was degraded at that moment" in text
    assert "before: rank 0: 1 engine batches are lost" in text
    assert "the hit told from KV events: the worker's events were not complete" in text
    assert main(["explain", request_id, "--json", "--data-dir", str(fleet.folder)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["request"]["trust"] == "degraded"
    assert "gap" in {c["kind"] for c in told["changes_before"]}
