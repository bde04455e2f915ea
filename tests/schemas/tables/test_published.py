"""The published tables: DDL that DuckDB takes, a comment on everything, macros and histograms that give the right figures."""

import datetime as dt

import duckdb
import numpy as np
import pytest

from schemas.tables.published import TABLES, latency_bucket, latency_middle_s, macros_sql

NOON = dt.datetime(2026, 1, 1, 12)


@pytest.fixture
def db():
    with duckdb.connect() as connection:
        for table in TABLES:
            connection.execute(table.ddl())
        connection.execute(macros_sql())
        yield connection


def test_every_table_and_column_has_a_comment(db):
    assert db.execute("SELECT count(*) FROM duckdb_tables() WHERE comment IS NULL").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM duckdb_columns() WHERE NOT internal AND comment IS NULL").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM duckdb_columns() WHERE NOT internal").fetchone()[0] > 150


def test_hit_rate_is_token_weighted_and_null_where_nothing_was_reported(db):
    db.execute(
        "INSERT INTO worker_10s (bucket, worker, reported_prompt_tokens, cached_tokens) VALUES (?, 'a', 900, 450), (?, 'b', 100, 0)",
        [NOON, NOON],
    )
    ask = "SELECT hit_rate(?, ?)"
    assert db.execute(ask, [NOON, NOON + dt.timedelta(seconds=10)]).fetchone() == (0.45,)
    assert db.execute(ask, [NOON + dt.timedelta(seconds=10), NOON + dt.timedelta(hours=1)]).fetchone() == (None,)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_ttft_percentiles_from_merged_histograms_are_within_one_percent(db, q):
    rng = np.random.default_rng(3)
    values = {w: rng.lognormal(mean, 0.8, 5000) for w, mean in (("a", -1.0), ("b", 0.5))}
    for worker, sample in values.items():
        buckets, n = np.unique([latency_bucket(v) for v in sample], return_counts=True)
        db.executemany(
            "INSERT INTO latency_10s (bucket, worker, measure, log_bucket, n) VALUES (?, ?, 'ttft', ?, ?)",
            [(NOON, worker, int(b), int(k)) for b, k in zip(buckets, n, strict=True)],
        )
    window = [NOON, NOON + dt.timedelta(minutes=1)]
    for worker, sample in [*values.items(), (None, np.concatenate(list(values.values())))]:
        found = db.execute("SELECT ttft(?, ?, ?, ?)", [worker, q, *window]).fetchone()[0]
        exact = float(np.quantile(sample, q, method="inverted_cdf"))
        assert found == pytest.approx(exact, rel=0.0101)


def test_a_latency_lies_in_its_bucket():
    for value in [1e-4, 1.5e-4, 0.01, 0.5, 1.0, 60.0, 3600.0]:
        assert latency_middle_s(latency_bucket(value)) == pytest.approx(value, rel=0.0101)
    assert latency_bucket(0.0) == latency_bucket(1e-9) == 0
