import pytest

from router.http.usage import StreamTail, Usage, WholeAnswer, usage_of
from tests.router.recordings import requests_of


def tail_of(*chunks):
    tail = StreamTail()
    for chunk in chunks:
        tail.add(chunk)
    return tail.usage()


def test_usage_is_found_however_the_stream_is_cut():
    stream = b'data: {"usage":null}\n\ndata: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    for size in (1, 7, 64, 1000):
        assert tail_of(*(stream[i : i + size] for i in range(0, len(stream), size))) == Usage(prompt_tokens=9, completion_tokens=2)


def test_a_long_stream_is_kept_only_at_its_end():
    tail = StreamTail()
    for _ in range(10_000):
        tail.add(b"data: {}\n\n" * 10)
    assert tail._size < 20_000
    tail.add(b'data: {"usage":{"prompt_tokens":1}}\n\n')
    assert tail.usage().prompt_tokens == 1


@pytest.mark.parametrize(
    "text", [b"", b"data: [DONE]\n\n", b'data: {"usage":{"prompt_tokens":"9"}}\n', b'data: {"usage":[]}\n', b'data: {"usage"']
)
def test_what_is_missing_or_odd_is_unknown(text):
    assert tail_of(text) == Usage()


def test_an_answer_over_the_bound_is_unknown(monkeypatch):
    monkeypatch.setattr("router.http.usage.WHOLE_BYTES", 10)
    answer = WholeAnswer()
    answer.add(b'{"usage":{"prompt_tokens":9}}')
    assert answer.usage() == Usage()


def test_the_recorded_answers_of_vllm_are_read_whole():
    streams = 0
    for line in requests_of("e-per-request-metrics"):
        usage = line.get("usage")
        if not usage:
            continue
        if "sse" in line:
            streams += 1
            found = tail_of(*(f"{x}\n\n".encode() for x in line["sse"]))
        else:
            import orjson

            found = usage_of(orjson.dumps(line["response"]))
        details = usage["prompt_tokens_details"]
        assert (found.prompt_tokens, found.cached_tokens, found.created_tokens) == (
            usage["prompt_tokens"], details["cached_tokens"], details.get("created_cache_tokens"),
        )  # fmt: skip
        assert found.engine_ttft_s > 0
        assert found.engine_queue_s >= 0
    assert streams > 0
