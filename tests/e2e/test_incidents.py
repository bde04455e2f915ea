"""The demo's incidents as the published file tells them, held against the book of what truly happened."""

from __future__ import annotations

import orjson
import pytest

from tests.e2e.test_demo import LIMIT_S, ask, run_demo

SECONDS = 75
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("incidents") / "demo"
    status, out = run_demo(folder, "--seconds", str(SECONDS))
    assert status == 0, out
    book = [orjson.loads(line) for line in (folder / "incidents.jsonl").read_bytes().splitlines()]
    return folder, {(n["name"], n["event"]): n["time_s"] for n in book}


def lost(folder, cause, since_s, until_s, where="true"):
    """Tokens lost for a cause by requests that were dispatched between two times."""
    ((tokens,),) = ask(
        folder,
        f"""SELECT coalesce(sum({cause}_tokens), 0) FROM requests
            WHERE started_at BETWEEN make_timestamp({int(since_s * 1e6)}) AND make_timestamp({int(until_s * 1e6)}) AND {where}""",
    )
    return tokens


def test_every_token_of_every_attributed_request_has_one_fate(played):
    folder, _ = played
    ((requests, untold, off),) = ask(
        folder,
        """SELECT count(*), count(*) FILTER (causes IS NULL), count(*) FILTER (list_sum([c.tokens FOR c IN causes]) != prompt_tokens)
           FROM requests WHERE error IS NULL AND status < 400""",
    )
    assert requests > 300
    assert untold < 0.03 * requests, "the last ones, whose bridge ended before its word could come"
    assert off == 0
    ((rolled, rows),) = ask(
        folder, "SELECT (SELECT sum(tokens) FROM loss_10s), (SELECT sum(prompt_tokens) FROM requests WHERE len(causes) > 0)"
    )
    assert rolled == rows
    ((told, all_),) = ask(folder, "SELECT sum(tokens) FILTER (cause != 'unexplained'), sum(tokens) FROM loss_10s")
    assert told > 0.97 * all_


def test_the_restart_empties_one_workers_cache(played):
    folder, at = played
    ((worker, when_s),) = ask(folder, "SELECT worker, epoch_us(happened_at) / 1e6 FROM changes WHERE kind = 'restart'")
    assert worker == "w1"
    assert abs(when_s - at["restart", "begins"]) < 5
    begin = at["restart", "begins"]
    # Its sessions find their prefix nowhere: cleared where they stay, elsewhere what they left is gone from the fleet.
    assert lost(folder, "cleared", begin, begin + 15) + lost(folder, "evicted_elsewhere", begin, begin + 15) > 0
    assert lost(folder, "cleared", 0, begin) == 0


def test_the_prompt_that_got_a_timestamp_diverges(played):
    folder, at = played
    begin, end = at["timestamp", "begins"], at["timestamp", "ends"]
    mine = lost(folder, "diverged", begin + 1, end, "route = 'agent-0'")
    others = lost(folder, "diverged", begin + 1, end, "route != 'agent-0'")
    assert mine > 5 * max(others, 100)
    ((route,),) = ask(folder, "SELECT route FROM divergence GROUP BY route ORDER BY sum(diverged_tokens) DESC LIMIT 1")
    assert route == "agent-0"


def test_the_cache_that_shrank_evicts_more(played):
    folder, at = played
    begin, end = at["shrink", "begins"], at["shrink", "ends"]
    span = f"bucket BETWEEN make_timestamp({int((begin - 10) * 1e6)}) AND make_timestamp({int(end * 1e6)})"
    rows = ask(folder, f"SELECT worker, sum(removed_blocks) / nullif(sum(stored_blocks), 0) FROM worker_10s WHERE {span} GROUP BY 1")
    assert max(rows, key=lambda r: r[1] or 0)[0] == "w2"


def test_workers_that_joined_serve(played):
    folder, _ = played
    assert {w for (w,) in ask(folder, "SELECT DISTINCT worker FROM requests WHERE worker IN ('w4', 'w5')")} == {"w4", "w5"}


def test_round_robin_is_misrouting_by_the_cost_model(played):
    folder, at = played
    begin, end = at["policy", "begins"], at["policy", "ends"]
    during = lost(folder, "misrouted", begin, end)
    assert during > 0
    assert lost(folder, "misrouted", 0, begin - 1) < during


def test_the_cost_policy_hits_more_than_round_robin(played):
    folder, _ = played
    hits = dict(
        ask(folder, "SELECT policy, sum(cached_tokens) / sum(prompt_tokens) FROM requests WHERE cached_tokens IS NOT NULL GROUP BY 1")
    )
    assert hits["cost"] > hits["round_robin"] + 0.1


def test_lost_event_frames_are_said_and_explained_by_nothing_else(played):
    folder, _ = played
    assert ask(folder, "SELECT DISTINCT worker FROM changes WHERE kind = 'gap'") == [("w0",)]
    ((reasons,),) = ask(folder, "SELECT list(DISTINCT unexplained_reason) FROM requests WHERE worker = 'w0' AND unexplained_tokens > 0")
    assert "gap" in (reasons or [])
