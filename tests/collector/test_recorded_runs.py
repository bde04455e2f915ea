"""A real vLLM's own words through the whole collector: local stream, ingest, published database."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collector.ingest import Collector
from schemas.kv_events import decode
from schemas.stream import open_stream
from schemas.topics import DECISIONS, KV_EVENTS, OUTCOMES, topic_specs
from tests.collector.driven import ask, drain, settings
from tests.collector.runs import FOLDERS, expected, kv_records, requests
from tests.collector.traffic import load, put


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All five runs read in small slices and one restart in the middle."""
    root = tmp_path_factory.mktemp("runs")
    url = f"local:{root / 'stream.sqlite'}?durability=process"
    with open_stream(url) as stream:
        stream.ensure_topics(topic_specs("", 2))
        writer = stream.writer()
        for folder in FOLDERS:
            for source, records in kv_records(folder):
                for record in records:
                    writer.append(KV_EVENTS, source.key, record)
                put(writer, "", load(source, time.time(), epoch=decode(records[-1]).epoch))  # the bridge is alive after the end
            for decision, outcome in requests(folder):
                writer.append(DECISIONS, decision.request_id.encode(), decision.model_dump_json().encode())
                writer.append(OUTCOMES, outcome.request_id.encode(), outcome.model_dump_json().encode())
        writer.close(10)
        first = Collector(settings(root / "data", url, poll_records=40), stream)
        first.start()
        for _ in range(6):
            first.turn()
        first.close()
        second = Collector(settings(root / "data", url, poll_records=500), stream)
        second.start()
        drain(second, stream)
        second.stop()
    yield root / "data"


def test_hits_from_events_equal_the_engines_reports_in_all_167_answers(data_dir: Path) -> None:
    assert ask(
        data_dir,
        "SELECT count(*), count(*) FILTER (event_hit_tokens = cached_tokens) FROM requests WHERE cached_tokens IS NOT NULL",
    ) == [(167, 167)]


def test_hits_from_events_equal_the_expected_ones_where_nothing_was_reported(data_dir: Path) -> None:
    silent = {
        f"{f}/{i}": x["predicted_cached_tokens"] for (f, i), x in expected().items() if x["status"] == 200 and x["cached_tokens"] is None
    }
    silent = {k: v for k, v in silent.items() if v is not None}
    found = dict(ask(data_dir, "SELECT request_id, event_hit_tokens FROM requests WHERE cached_tokens IS NULL AND status = 200"))
    assert len(found) == 5
    assert found == silent


def test_every_request_has_one_row_and_refused_ones_have_no_hit(data_dir: Path) -> None:
    total = sum(1 for folder in FOLDERS for _ in requests(folder))
    assert ask(
        data_dir, "SELECT count(*), count(DISTINCT request_id), count(*) FILTER (outcome_missing OR decision_missing) FROM requests"
    ) == [(total, total, 0)]
    assert ask(data_dir, "SELECT count(*) FROM requests WHERE status >= 400 AND event_hit_tokens IS NOT NULL") == [(0,)]


def test_peak_residency_is_the_engines_pool_and_nothing_was_unknown(data_dir: Path) -> None:
    peaks = {(w, r): (p, t) for w, r, p, t in ask(data_dir, "SELECT worker, rank, peak_resident_blocks, trust FROM workers")}
    assert peaks["a-int-hash", 0] == (199, "exact")
    assert peaks["b-bytes-hash", 0] == (131, "exact")
    assert peaks["c-preemption", 0] == (131, "exact")
    assert all(trust == "exact" for _, trust in peaks.values())
    assert ask(data_dir, "SELECT count(*) FROM data_health WHERE name IN ('unknown_removals', 'stale_records', 'mismatches')") == [(0,)]


def test_ranks_are_told_from_the_requests_own_stores(data_dir: Path) -> None:
    want = {f"{f}/{i}": x["rank"] for (f, i), x in expected().items() if f == "d-two-dp-ranks" and x["prompt_tokens"]}
    found = dict(ask(data_dir, "SELECT request_id, rank FROM requests WHERE worker = 'd-two-dp-ranks' AND status = 200"))
    assert found == want


def test_the_counts_by_worker_add_up_to_the_requests(data_dir: Path) -> None:
    by_bucket = ask(
        data_dir,
        "SELECT sum(requests), sum(failed), sum(cached_tokens), sum(event_requests), sum(event_hit_tokens), sum(event_mismatches) "
        "FROM worker_10s",
    )
    by_request = ask(
        data_dir,
        "SELECT count(*), count(*) FILTER (status >= 400), sum(cached_tokens), count(event_hit_tokens), sum(event_hit_tokens), 0 "
        "FROM requests",
    )
    assert by_bucket == by_request


def test_stored_and_removed_blocks_agree_between_rows_and_counts(data_dir: Path) -> None:
    rows = dict(ask(data_dir, "SELECT kind, sum(len(hashes)) FROM kv_events WHERE kind IN ('stored', 'removed') GROUP BY kind"))
    counts = ask(data_dir, "SELECT sum(stored_blocks), sum(removed_blocks) FROM worker_10s")[0]
    assert (rows["stored"], rows["removed"]) == counts
