"""What `warmwatch explain` says of requests with every kind of story, from published files of this version and of the one before."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from schemas.tables.explain import ExplainSettings, run
from schemas.tables.explained import Facts, page
from schemas.tables.published import MAJOR, MINOR, TABLES
from schemas.tables.read import FILE_NAME
from schemas.tables.table import Table
from warmwatch import main

AT = dt.datetime(2026, 11, 30, 12, 0, 5)
NOW = AT + dt.timedelta(seconds=20)
Row = dict[str, Any]


def request(**more: Any) -> Row:
    """A request that went well: 1000 of 1200 tokens were expected in the cache, and were."""
    usual = {
        "request_id": "q", "started_at": AT, "ended_at": AT + dt.timedelta(seconds=2), "router": "r1", "pool": "p",
        "worker": "w1", "rank": 0, "model": "m", "path": "/v1/completions", "route": "default", "tenant": "t", "session_id": "s",
        "stream": True, "policy": "cost", "policy_version": "2", "coefficients_version": "fit-3", "token_source": "exact",
        "prompt_tokens": 1200, "cached_tokens": 1000, "event_hit_tokens": 1000, "predicted_tokens": 1000,
        "best_overlap_tokens": 1000, "best_overlap_worker": "w1", "best_overlap_rank": 0, "block_size": 10, "chain_blocks": 120,
        "runner_up_worker": "w2", "runner_up_rank": 0, "margin_s": 0.08, "trust": "exact", "index_lag_s": 0.25, "index_behind_s": 0.02,
        "workers_considered": 2, "status": 200, "ttft_s": 0.1, "e2e_s": 2.0, "retries": 0, "waited_s": 0.0, "decide_us": 80.0,
        "decision_missing": False, "outcome_missing": False,
    }  # fmt: skip
    return usual | more


def candidate(worker: str, position: int = 1, **more: Any) -> Row:
    usual = {
        "request_id": "q", "started_at": AT, "position": position, "chosen": position == 0, "pool": "p", "worker": worker, "rank": 0,
        "overlap_tokens": 0, "overlap_gpu_tokens": 0, "overlap_cpu_tokens": 0, "overlap_disk_tokens": 0, "speculative_tokens": 0,
        "queue_s": 0.0, "prefill_s": 0.1, "load_s": 0.0, "decode_s": 0.0, "cost_s": 0.1, "epoch": 1, "seq": 7, "trust": "exact",
        "in_flight": 0, "decoding": 0, "draining": False, "allowed": True,
    }  # fmt: skip
    return usual | more


CHOSEN = candidate("w1", 0, overlap_tokens=1000, overlap_gpu_tokens=1000, prefill_s=0.02, cost_s=0.02)
OTHER = candidate("w2")


def explained(facts: Facts) -> str:
    return " ".join(page(facts, NOW).split())


def said(request_row: Row, *candidates: Row, **more: Any) -> str:
    return explained(Facts(request_row, candidates or (CHOSEN, OTHER), **more))


def published(folder: Path, tables: dict[str, list[Row]], leave_out: tuple[str, ...] = (), version: str = f"{MAJOR}.{MINOR}") -> Path:
    """A published file with these rows; columns or tables that are left out are those that an older version does not have."""
    path = folder / FILE_NAME
    rows = {"published": [{"published_at": NOW, "version": version, "state": "running"}], **tables}
    with duckdb.connect(str(path)) as db:
        for table in TABLES:
            if table.name in leave_out:
                continue
            kept = Table(table.name, table.comment, tuple(c for c in table.columns if f"{table.name}.{c.name}" not in leave_out))
            db.execute(kept.ddl())
            for row in rows.get(table.name, ()):
                names = [c.name for c in kept.columns if c.name in row]
                marks = ", ".join("?" * len(names))
                db.execute(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({marks})", [row[n] for n in names])
    return path


def test_a_plain_story_is_told_from_the_request_to_its_outcome() -> None:
    text = said(request())
    for part in (
        "Request q 2026-11-30 12:00:05.000 UTC, 20 s ago",
        "router r1 · pool p · model m · /v1/completions · stream",
        "prompt of 1 200 tokens (120 full blocks of 10) exact: counted by the router's own tokenizer",
        "Decision: w1 policy cost (version 2), coefficients fit-3, decided in 80 us",
        "> w1 1 000 0.0 20.0 0.0 20.0 0 exact 1/7",
        "Runner-up: w2, which would have cost 80 ms more.",
        "No worker of the pool held more of this prompt than the 1 000 tokens here.",
        "the engine found 1 000 of 1 200 prompt tokens in its cache (83%) predicted: 1 000, as it was",
        "told from KV events: 1 000, as the engine says",
    ):
        assert part in text
    assert "Not known" not in text


def test_why_the_longest_prefix_was_not_taken_is_told_by_the_terms_that_made_it_dear() -> None:
    best = candidate("w3", overlap_tokens=1100, queue_s=0.5, prefill_s=0.01, decode_s=0.03, cost_s=0.29)
    text = said(request(best_overlap_tokens=1100, best_overlap_worker="w3"), CHOSEN, best)
    assert (
        "w3 held 1 100 tokens, 100 more than the chosen one, but would have cost 270 ms more: 500 ms more of waiting, 10 ms less of "
        "prefill, 30 ms more of decoding beside it." in text
    )


@pytest.mark.parametrize(
    ("best", "attempts", "says"),
    [
        ({"allowed": False, "draining": True}, (), "but could not be chosen: it was draining."),
        ({"allowed": False}, ("w3",), "but could not be chosen: it had been tried before."),
        ({"allowed": False}, (), "but could not be chosen: it was down, full, or not the one it had to go to."),
        ({"trust": "blind", "cost_s": 0.3}, (), "Its index was blind: nothing certain was known of its cache"),
        ({"cost_s": 0.001}, (), "and would have been 19 ms cheaper: the policy cost chooses by other things."),
        ({"cost_s": None}, (), "100 more than the chosen one; the policy cost does not look at that."),
    ],
)
def test_other_reasons_are_told_too(best: Row, attempts: tuple[str, ...], says: str) -> None:
    row = request(best_overlap_tokens=1100, best_overlap_worker="w3")
    tried = [{"worker": w, "rank": 0, "error": "connect", "after_s": 0.1} for w in attempts]
    assert says in said(row, CHOSEN, candidate("w3", overlap_tokens=1100, **best), attempts=tried)


def test_what_an_index_was_not_trusted_for_is_told_with_what_happened_before() -> None:
    gap = {"happened_at": AT - dt.timedelta(seconds=30), "kind": "gap", "text": "rank 0: 1 engine batches are lost"}
    text = said(request(trust="degraded", event_hit_tokens=None), CHOSEN | {"trust": "degraded"}, changes=[gap])
    assert "The index of w1 was degraded at that moment" in text
    assert "30 s before: rank 0: 1 engine batches are lost" in text
    assert "Not known the hit told from KV events: the worker's events were not complete" in text


def test_terms_and_overlap_that_a_router_does_not_tell_are_not_taken_for_zero() -> None:
    best = candidate("w3", overlap_tokens=1100, queue_s=None, prefill_s=0.01, decode_s=None, cost_s=0.29)
    text = said(request(best_overlap_tokens=1100, best_overlap_worker="w3"), CHOSEN | {"decode_s": 0.2}, best)
    assert "would have cost 270 ms more: 10 ms less of prefill." in text
    text = said(request(), CHOSEN | {"overlap_tokens": None}, best)
    assert "w1 held 1 000 tokens, the most in the pool; how many the chosen one held is not known." in text


def test_only_workers_that_could_have_been_chosen_are_counted_among_those_considered() -> None:
    text = said(request(workers_considered=9), CHOSEN, OTHER, candidate("w3", allowed=False))
    assert "2 of 9 workers that could have been chosen are listed" in text


def test_shadows_and_attempts_are_told() -> None:
    shadows = [
        {"policy": "max_prefix", "worker": "w1", "rank": 0, "same": True, "predicted_tokens": 1000, "margin_s": 0.0},
        {"policy": "round_robin", "worker": "w2", "rank": 3, "same": False, "predicted_tokens": 0, "margin_s": -0.08},
    ]
    attempts = [{"worker": "w9", "rank": 0, "error": "connect: refused", "after_s": 0.02}]
    text = said(request(retries=1), shadows=shadows, attempts=attempts, earlier_decisions=1)
    assert "max_prefix the same worker 1 000 tokens cached" in text
    assert "round_robin w2 rank 3 0 tokens cached -80 ms" in text
    assert "1. w9 after 20 ms: connect: refused" in text
    assert "the last of 2 decisions" in text
    assert "1 retry" in text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (request(predicted_tokens=1040), "predicted: 1 040, 40 too many"),
        (request(predicted_tokens=960), "predicted: 960, 40 too few"),
        (request(event_hit_tokens=960), "told from KV events: 960, which is NOT what the engine says"),
        (request(cached_tokens=None), "cached tokens: the engine did not report them"),
        (request(ended_at=None, status=None), "In flight, for 20 s so far: no outcome yet."),
        (request(ended_at=None, status=None, outcome_missing=True), "None was received in time: how it ended is not known."),
        (request(status=None, error="disconnect"), "Outcome: the client left before an answer, disconnect"),
        (request(status=504, error="timeout"), "Outcome: HTTP 504, timeout"),
        (request(error="upstream"), "Outcome: HTTP 200, then the worker broke its answer off"),
        (request(decision_missing=True, policy=None), "No decision of this request was received in time"),
        (request(policy=None, worker=None, status=429, error="queue full"), "None: no worker could be chosen (see the outcome)."),
        (request(token_source="none", token_reason="too_long", prompt_tokens=None), "so only load decided (too_long)"),
        (request(token_source="text"), "predicted: 1 000 (a guess from text), as it was"),
        (request(best_overlap_tokens=None), "who held how much of this prompt: its prefix was unknown to the router"),
        (request(best_overlap_tokens=0), "No worker of the pool held the beginning of this prompt."),
        (request(margin_s=-0.05), "By the cost model w2 would have been 50 ms cheaper."),
        (request(margin_s=0.0), "Runner-up: w2, at the same cost."),
        (request(margin_s=None, runner_up_worker=None, workers_considered=1), "No other worker could have been chosen."),
        (request(waited_s=1.5), "after 1.5 s in the router's own queue"),
    ],
)  # fmt: skip
def test_each_ending_and_each_gap_in_what_is_known_is_said(row: Row, says: str) -> None:
    assert says in said(row)


def test_a_record_that_says_nothing_but_where_it_went_is_told_without_made_up_figures() -> None:
    bare = {"request_id": "q", "started_at": AT, "worker": "w1", "policy": "foreign", "ended_at": AT, "status": 200}
    text = explained(Facts(bare))
    assert "prompt of an unknown number of tokens" in text
    assert "the other workers: the router recorded no candidates" in text
    assert " 0 " not in text.replace("12:00", "")


def test_why_tokens_were_computed_is_told_from_the_first_token_on() -> None:
    runs = [{"cause": "hit", "tokens": 600}, {"cause": "evicted", "tokens": 300}, {"cause": "first_seen", "tokens": 290}]
    runs += [{"cause": "granularity", "tokens": 10}]
    row = request(
        causes=runs, hit_tokens=600, ideal_tokens=900, held_tokens=900, held_worker="w3", selected_tokens=600, diverged_at_token=37,
        lost_s=0.06, avoidable_s=0.03, regret_tokens=300, regret_s=-0.5, unexplained_reason=None, loss_trust="degraded",
    )  # fmt: skip
    text = said(row)
    for part in (
        f"Why its tokens were computed {'█' * 30}{'e' * 15}{'·' * 15} from token tokens share cause",
        "█ 0 600 50.0% hit found in the worker's cache e 600 300 25.0% evicted capacity evicted from this worker",
        "g 1 190 10 0.8% granularity nobody (block size)",
        "900 had been computed before by any worker; at the dispatch one worker held 900 (w3), the chosen one 600; 600 were found.",
        "It shares 37 tokens with earlier prompts before the first that differs.",
        "What was computed cost 60 ms of prefill by the cost model, of which somebody can act on 30 ms.",
        "Another worker held 300 of the computed tokens at the dispatch; going here bought 500 ms.",
        "Told from events that were degraded: causes may be wrong.",
    ):
        assert part in text, part
    assert "Why its tokens" not in said(request(causes=None)) + said(request(causes=[]))
    many = said(request(causes=[{"cause": "new\x1b", "tokens": 1}] * 50, hit_tokens=None, regret_tokens=5, regret_s=0.2))
    assert "and 10 further runs" in many and "new\\x1b a cause that this version does not know" in many
    assert "and would have been 200 ms cheaper" in many and "some of these tokens may have been hits" in many


def test_names_from_outside_cannot_steer_the_terminal() -> None:
    text = page(Facts(request(route="a\x1b[2J\nb", error="e\r", tenant="größe 🦊"), (CHOSEN | {"worker": "w\x07"},)), NOW)
    assert not set(text) & {"\x1b", "\r", "\x07"}
    assert "a\\x1b[2J\\nb" in text
    assert "größe 🦊" in text


def test_tiers_loading_and_expected_tokens_have_columns_only_where_there_are_any() -> None:
    cold = page(Facts(request(), (CHOSEN, OTHER)), NOW)
    warm = page(Facts(request(), (CHOSEN | {"overlap_cpu_tokens": 320, "load_s": 0.004, "speculative_tokens": 48}, OTHER)), NOW)
    assert not {"cpu", "load", "expected"} & set(cold.split())
    assert {"cpu", "disk", "load", "expected", "320", "4.0", "+48"} <= set(warm.split())
    for text in (cold, warm):
        lines = text.splitlines()
        head = next(i for i, line in enumerate(lines) if "prefill" in line)
        assert lines[head].index("trust") == lines[head + 1].index("exact") == lines[head + 2].index("exact")


def test_it_reads_the_last_decision_of_a_request_and_counts_those_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = AT - dt.timedelta(seconds=1)
    attempt = {
        "request_id": "q",
        "started_at": AT,
        "position": 0,
        "pool": "p",
        "worker": "w9",
        "rank": 0,
        "error": "upstream",
        "after_s": 0.9,
    }
    shadow = {"request_id": "q", "started_at": AT, "policy": "random", "worker": "w2", "rank": 0, "same": False, "predicted_tokens": 0}
    gap = {"happened_at": before, "kind": "gap", "text": "lost", "pool": "p", "worker": "w1"}
    published(
        tmp_path,
        {
            "requests": [request(), request(request_id="q~2"), request(request_id="newer", started_at=AT + dt.timedelta(seconds=9))],
            "candidates": [OTHER, CHOSEN, candidate("w9", 0, started_at=before), candidate("x", 0, request_id="other")],
            "shadows": [shadow],
            "attempts": [attempt],
            "changes": [gap, gap | {"worker": "w2"}],
        },
    )
    assert run(ExplainSettings(request_id="q", data_dir=tmp_path)) == 0
    text = capsys.readouterr().out
    assert "the last of 2 decisions" in text
    assert "the client sent this id with other requests, too: q~2" in text
    assert "1. w9 after 900 ms: upstream" in text
    assert run(ExplainSettings(request_id="q", data_dir=tmp_path, as_json=True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert [c["worker"] for c in told["candidates"]] == ["w1", "w2"]
    assert (told["request"]["started_at"], told["shadows"][0]["policy"], told["attempts"][0]["worker"]) == (
        "2026-11-30T12:00:05Z",
        "random",
        "w9",
    )
    assert [c["text"] for c in told["changes_before"]] == ["lost"]
    assert main(["explain", "--last", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Request newer\n")


def test_a_file_of_the_version_before_is_read_and_what_it_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = (
        "shadows",
        "attempts",
        "requests.runner_up_worker",
        "requests.coefficients_version",
        "candidates.allowed",
        "candidates.load_s",
    )
    published(tmp_path, {"requests": [request()], "candidates": [CHOSEN, OTHER]}, lacking, version="1.0")
    assert main(["explain", "q", "--data-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "The runner-up would have cost 80 ms more." in text
    assert "shadows: the published file is of an earlier version, without that table" in text


def test_the_newest_request_of_an_id_is_told_and_some_of_those_that_came_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [request(request_id=f"q~{i}", started_at=AT - dt.timedelta(minutes=50 - i)) for i in range(2, 40)]
    rows += [request(worker="old", started_at=AT - dt.timedelta(days=1)), request(started_at=None, worker="undated", ended_at=None)]
    published(tmp_path, {"requests": [*rows, request(worker="new")]})
    assert main(["explain", "q", "--data-dir", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Decision: new" in text
    assert "with other requests, too: q, q, q~39, q~38, " in text
    assert "q~32 ... Decision" in text


def test_the_newest_request_may_be_one_without_a_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone = request(request_id="lone", started_at=None, ended_at=AT + dt.timedelta(seconds=9), policy=None, decision_missing=True)
    for folder, rows in (("alone", [lone]), ("last", [request(), lone])):
        (tmp_path / folder).mkdir()
        published(tmp_path / folder, {"requests": rows})
        assert main(["explain", "--last", "--data-dir", str(tmp_path / folder)]) == 0
        assert capsys.readouterr().out.startswith("Request lone\n")


def test_ids_from_outside_are_values_of_a_question_and_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["a' OR TRUE --", "%", "\x1b[2J", "tab\tand\u009bcontrol", "x" * 1024, "größe 🦊\U000e0001"]
    dead = {"key": "\x1b[2", "reason": "late: request \x1b[2J"}
    published(tmp_path, {"requests": [request(request_id=i) for i in ids], "dead_letters": [dead]})
    for asked in ids:
        assert main(["explain", asked, "--json", "--data-dir", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert json.loads(out)["request"]["request_id"] == asked
        assert all(c.isprintable() or c == "\n" for c in out)
    for asked in ("' OR TRUE --", "\x1b[2", "_", "x" * 1025):
        assert main(["explain", asked, "--data-dir", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert all(c.isprintable() or c == "\n" for c in told)


def test_a_request_that_is_not_there_is_said_with_where_it_may_be_and_what_is_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = {"key": "chat-lost", "reason": "late: closed"}
    published(tmp_path, {"requests": [request(request_id=f"chat-{i}") for i in range(9)], "dead_letters": [dead]})
    assert main(["explain", "chat-lost", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    for part in (
        "there is no request 'chat-lost'",
        "It holds 9 requests, from 2026-11-30 12:00:05",
        "keep_s",
        "late: closed",
        "Near it: chat-",
    ):
        assert part in error
    assert error.count("chat-") == 1 + 5


@pytest.mark.parametrize("before", ["chatcmpl-", "cmpl-", "resp_"])
def test_the_answers_own_id_finds_its_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str) -> None:
    published(tmp_path, {"requests": [request(request_id="q-1"), request(request_id=f"{before}own")]})
    for asked, found in ((f"{before}q-1", "q-1"), (f"{before}own", f"{before}own")):
        assert main(["explain", asked, "--json", "--data-dir", str(tmp_path)]) == 0
        assert f'"request_id": "{found}"' in capsys.readouterr().out
    assert main(["explain", f"{before}q-2", "--data-dir", str(tmp_path)]) == 1
    assert f"there is no request '{before}q-2'" in capsys.readouterr().err


def test_no_requests_no_file_and_no_id_are_three_different_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "q", "--data-dir", str(tmp_path)]) == 1
    assert "there is no published database" in capsys.readouterr().err
    published(tmp_path, {})
    assert main(["explain", "--last", "--data-dir", str(tmp_path)]) == 1
    assert "has no requests yet" in capsys.readouterr().err
    for arguments in ([], ["q", "--last"]):
        assert main(["explain", *arguments, "--data-dir", str(tmp_path)]) == 2
        assert "name one request id, or say --last" in capsys.readouterr().err
