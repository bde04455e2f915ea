"""A reader of the published file in a process of its own: asks again and again until told to stop, and says what went wrong.

python -m tests.collector.reader PUBLISHED_FILE STOP_FILE   -> one JSON line {"asked": n, "seconds": s, "errors": [...]}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import duckdb

from schemas.tables.read import file_state, open_published

# Rows and counts are written in different ways; in any one published file they have to agree.
AGREE = """
SELECT (SELECT coalesce(sum(blocks), 0) FROM kv_events WHERE kind = 'stored') = (SELECT coalesce(sum(stored_blocks), 0) FROM worker_10s),
       (SELECT count(*) FROM requests) = (SELECT count(DISTINCT request_id) FROM requests)
"""
QUESTIONS = (
    "SELECT state, published_at FROM published",
    "SELECT worker, max(seq), sum(len(hashes)) FROM kv_events GROUP BY ALL",
    "SELECT hit_rate(TIMESTAMP '2000-01-01', TIMESTAMP '2100-01-01'), ttft(NULL, 0.9, TIMESTAMP '2000-01-01', TIMESTAMP '2100-01-01')",
    "SELECT * FROM requests ORDER BY started_at DESC LIMIT 50",
    "SELECT * FROM workers",
    "SELECT count(*) FROM data_health",
)


def main() -> None:
    path, stop = Path(sys.argv[1]), Path(sys.argv[2])
    asked, errors, began = 0, [], time.monotonic()
    published_before = None
    while not stop.exists():
        try:
            # Turn about: through the door that the dashboard uses, and as any DuckDB client would.
            connection = open_published(path) if asked % 2 else duckdb.connect(":memory:")
            try:
                if not asked % 2:
                    before = file_state(path)
                    try:
                        connection.execute(f"ATTACH '{path}' AS warmwatch (READ_ONLY)")
                        connection.execute("USE warmwatch")
                    except duckdb.Error:
                        if file_state(path) == before:
                            raise
                    if file_state(path) != before:  # DuckDB opens a file twice: see schemas/tables/read.py
                        continue
                if connection.execute(AGREE).fetchone() != (True, True):
                    errors.append("rows and counts disagree")
                for question in QUESTIONS:
                    rows = connection.execute(question).fetchall()
                    if question is QUESTIONS[0]:
                        if published_before is not None and rows[0][1] < published_before:
                            errors.append("an older file came back")
                        published_before = rows[0][1]
                asked += 1
            finally:
                connection.close()
        except Exception as e:  # the test wants to see whatever it is
            errors.append(f"{type(e).__name__}: {e}"[:300])
        if len(errors) > 5:
            break
        time.sleep(0.05)
    print(json.dumps({"asked": asked, "seconds": time.monotonic() - began, "errors": errors}))


if __name__ == "__main__":
    main()
