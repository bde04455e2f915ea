"""`warmwatch mark`: a change is in the stream when it says so, and never otherwise."""

import pytest

from schemas import mark
from schemas.changes import Change
from schemas.stream import TopicSpec, open_stream
from tests.schemas.stream.backends import read_all
from warmwatch import main


def test_a_change_is_written_as_it_was_told(tmp_path):
    url = f"local:{tmp_path}/log.sqlite"
    assert main(["mark", "rolled out prompt v7", "--kind", "deploy", "--author", "Ann", "--stream", url, "--topic-prefix", "x."]) == 0
    with open_stream(url) as stream:
        ((record,),) = read_all(stream, "x.changes").values()
    change = Change.model_validate_json(record.value)
    assert (change.text, change.kind, change.author, change.worker) == ("rolled out prompt v7", "deploy", "Ann", None)


def test_a_change_that_was_not_written_is_told_by_the_exit_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mark, "WRITE_LIMIT_S", 0.3)
    url = f"local:{tmp_path}/log.sqlite"
    with open_stream(url) as stream:
        stream.ensure_topics([TopicSpec("changes")])
        writer = stream.writer()
        for _ in range(30):
            writer.append("changes", b"k", bytes(8000))  # a page each
        writer.flush(10)
    assert main(["mark", "x" * 2000, "--stream", url + "?max_bytes=81920"]) == 1
    assert "the change was not written" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "says"), [(["mark", ""], "setting `text`"), (["mark", "x", "--stream", "local:"], "setting `stream`")])
def test_a_wrong_change_names_its_key(argv, says, capsys):
    assert main(argv) == 2
    assert says in capsys.readouterr().err
