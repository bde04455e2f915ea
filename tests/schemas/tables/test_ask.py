"""`warmwatch sql` on a published file made by hand."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from schemas.tables.ask import AskSettings, QuestionError, answer, run
from schemas.tables.published import TABLES, macros_sql
from schemas.tables.read import FILE_NAME


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    with duckdb.connect(folder / FILE_NAME) as db:
        for table in TABLES:
            db.execute(table.ddl())
        db.execute(macros_sql())
        db.execute("INSERT INTO published (version) VALUES ('1.0')")
        db.execute("INSERT INTO changes (kind, text) SELECT 'note', 'change ' || i FROM range(5) t(i)")
        db.execute("INSERT INTO dead_letters (reason, value) VALUES ('why', '\\x01\\xff'::BLOB)")
    return folder


def ask(data_dir: Path, question: str, **more: object) -> tuple[str, str]:
    out, notes = io.StringIO(), io.StringIO()
    settings = AskSettings.model_validate({"question": question, "data_dir": data_dir, **more})
    assert answer(data_dir / FILE_NAME, settings, out, notes) == 0
    return out.getvalue(), notes.getvalue()


def test_a_table_for_people(data_dir: Path) -> None:
    assert ask(data_dir, "SELECT text, 1.5::DOUBLE AS x, NULL AS nothing FROM changes ORDER BY text LIMIT 1;")[0].splitlines() == [
        "text      x    nothing",
        "--------  ---  -------",
        "change 0  1.5  NULL",
    ]


def test_what_clients_sent_cannot_steer_the_terminal(data_dir: Path) -> None:
    question = "SELECT 'a' || chr(27) || '[2J' || chr(155) || chr(10) || 'ö' AS x"
    assert ask(data_dir, question)[0].splitlines()[-1] == "a\\x1b[2J\\x9b ö"
    told = ask(data_dir, question, format="json")[0]
    assert told == '{"x": "a\\u001b[2J\\u009b\\nö"}\n'


def test_csv_and_json_for_programs(data_dir: Path) -> None:
    question = "SELECT kind, text, happened_at FROM changes ORDER BY text DESC"
    rows = list(csv.reader(io.StringIO(ask(data_dir, question, format="csv")[0])))
    assert rows[:2] == [["kind", "text", "happened_at"], ["note", "change 4", ""]]
    first = json.loads(ask(data_dir, question, format="json")[0].splitlines()[0])
    assert first == {"kind": "note", "text": "change 4", "happened_at": None}
    assert json.loads(ask(data_dir, "SELECT value FROM dead_letters", format="json")[0]) == {"value": "01ff"}
    assert json.loads(ask(data_dir, "SELECT 'nan'::DOUBLE AS x, 1.5::DOUBLE AS y", format="json")[0]) == {"x": None, "y": 1.5}


def test_a_long_answer_is_cut_and_says_so(data_dir: Path) -> None:
    out, notes = ask(data_dir, "FROM range(100)", format="csv", max_rows=10)
    assert len(out.splitlines()) == 11
    assert "cut after 10 rows" in notes
    assert ask(data_dir, "FROM range(10)", max_rows=10)[1] == ""


def test_now_is_utc_whatever_the_readers_time_zone(data_dir: Path) -> None:
    """Columns are UTC: a question about the last hour must not ask about another one in Tokyo."""
    code = (
        "import duckdb, pathlib, sys\n"
        "from schemas.tables.read import open_published\n"
        "assert duckdb.execute('SELECT now()::TIMESTAMP - epoch_ms(epoch_ms(now()))').fetchone()[0].total_seconds() > 8 * 3600\n"
        "db = open_published(pathlib.Path(sys.argv[1]))\n"
        "assert db.execute('SELECT now()::TIMESTAMP - epoch_ms(epoch_ms(now()))').fetchone()[0].total_seconds() < 1\n"
        "assert db.cursor().execute(\"SELECT current_setting('TimeZone')\").fetchone() == ('UTC',)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(data_dir / FILE_NAME)], env={**os.environ, "TZ": "Asia/Tokyo"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("question", ["DESCRIBE workers", "SHOW TABLES", "SUMMARIZE changes", "WITH a AS (SELECT 1) FROM a", "VALUES (1)"])
def test_every_kind_of_reading_is_allowed(data_dir: Path, question: str) -> None:
    assert ask(data_dir, question)[0]


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("", "there is no question"),
        ("SELECT 1; SELECT 2", "one question at a time"),
        ("DROP TABLE changes", "only questions that read"),
        ("COPY changes TO 'x.csv'", "only questions that read"),
        ("ATTACH 'x.db'", "only questions that read"),
        ("SELECT * FROM read_text('/etc/hostname')", "only the published tables"),
        ("SELECT * FROM read_csv('http://127.0.0.1:9/x')", "only the published tables"),
        ("SELEC 1", "syntax error"),
        ("FROM nothing_like_it", "nothing_like_it does not exist"),
    ],
)
def test_what_cannot_be_asked_says_why(data_dir: Path, question: str, says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        ask(data_dir, question)


def test_a_question_that_takes_too_long_is_stopped(data_dir: Path) -> None:
    with pytest.raises(QuestionError, match=r"stopped after 0.2 s"):
        ask(data_dir, "SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range * b.range % 7 = 1", timeout_s=0.2)


def test_no_file_is_a_message_and_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(AskSettings(question="FROM workers", data_dir=tmp_path)) == 1
    assert "there is no published database" in capsys.readouterr().err
    assert run(AskSettings(question="FROM workers", db=tmp_path / "other.duckdb")) == 1
    assert "other.duckdb" in capsys.readouterr().err
