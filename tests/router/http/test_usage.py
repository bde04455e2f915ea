import json

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
    assert tail._size <= 32 << 10
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


RESPONSES = {
    "input_tokens": 100, "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 32}, "output_tokens": 7, "total_tokens": 107,
}  # fmt: skip
ANTHROPIC = {"input_tokens": 4, "output_tokens": 7, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 32}


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        (RESPONSES, Usage(100, 64, 32, 7)),
        (ANTHROPIC, Usage(100, 64, 32, 7)),
        ({"input_tokens": 100, "output_tokens": 7}, Usage(100, None, None, 7)),
        ({"input_tokens": 36, "output_tokens": 7, "cache_read_input_tokens": 64}, Usage(100, 64, None, 7)),
        ({"prompt_tokens": 100, "total_tokens": 100}, Usage(100)),
    ],
)
def test_all_forms_tell_the_whole_prompt(usage, found):
    assert usage_of(json.dumps({"usage": usage}).encode()) == found
    assert usage_of(json.dumps({"type": "response.completed", "response": {"id": "resp_1", "usage": usage}}).encode()) == found


def test_a_last_event_longer_than_what_is_kept_still_tells_its_usage():
    said = 'he said "usage": {"input_tokens": 9} ' * 2000
    event = {"response": {"id": "resp_1", "output": [{"text": said}], "usage": RESPONSES, "user": None}, "type": "response.completed"}
    tail = StreamTail()
    line = b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\n"
    for i in range(0, len(line), 1000):
        tail.add(line[i : i + 1000])
    assert tail.usage() == Usage(100, 64, 32, 7)


def test_a_message_streams_usage_is_that_of_its_last_delta():
    tail = StreamTail()
    for event in ({"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 0}}},
                  {"type": "message_delta", "usage": ANTHROPIC}, {"type": "message_stop"}):  # fmt: skip
        tail.add(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n")
    assert tail.usage() == Usage(100, 64, 32, 7)


def test_of_a_long_whole_answer_only_the_usage_is_read():
    whole = WholeAnswer()
    data = [{"embedding": [0.5] * 1000} for _ in range(100)]
    whole.add(json.dumps({"data": data, "usage": {"prompt_tokens": 12, "total_tokens": 12}}).encode())
    assert whole.usage() == Usage(12)


@pytest.mark.parametrize("seen", [StreamTail, WholeAnswer])
def test_the_first_bytes_are_kept_for_who_looks_for_an_id(seen):
    answer = seen()
    for part in (b'{"id": ', b'"resp_1", ', b"x" * 5000):
        answer.add(part)
    assert answer.head[:18] == b'{"id": "resp_1", x'
    assert len(answer.head) <= 1024
