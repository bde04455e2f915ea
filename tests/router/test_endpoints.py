import json

import pytest

from router.endpoints import ENDPOINTS, brings_token, broken_off, own_error, stored_response


@pytest.mark.parametrize(
    ("path", "found"),
    [("/v1/responses/resp_1", "resp_1"), ("/v1/responses/resp_1/cancel", "resp_1"), ("/v1/responses/", None), ("/v1/responses", None)],
)
def test_which_stored_response_a_path_is_about(path, found):
    assert stored_response(path) == found


def test_what_is_special_about_each_path():
    flags = {e.path: (e.generates, e.keeps, e.usage_option) for e in ENDPOINTS.values()}
    assert flags == {
        "/v1/chat/completions": (True, False, True),
        "/v1/completions": (True, False, True),
        "/v1/responses": (True, True, False),
        "/v1/messages": (True, False, False),
        "/v1/embeddings": (False, False, False),
    }


@pytest.mark.parametrize(
    ("path", "piece", "brings"),
    [
        ("/v1/completions", b": waiting\n\n", False),
        ("/v1/completions", b'data: {"choices": []}\n\n', True),
        ("/v1/messages", b'event: message_start\ndata: {"type": "message_start"}\n\n', True),
        ("/v1/responses", b'data: {"instructions":"\\"type\\":\\"response.x\\"","type":"response.created"}\n\n', False),
        ("/v1/responses", b'data: {"type": "response.in_progress"}\n\n', False),
        ("/v1/responses", b'data: {"type":"response.created"}\n\ndata: {"type":"response.output_item.added"}\n\n', True),
        ("/v1/responses", b'event: error\ndata: {"type": "error"}\n\n', False),
    ],
)  # fmt: skip
def test_a_piece_of_a_stream_brings_a_token_once_something_was_computed(path, piece, brings):
    assert brings_token(path, piece) == brings


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/messages/count_tokens", "/tokenize"])
def test_the_routers_own_errors_have_the_form_of_the_paths_clients(path):
    content = own_error(path, 429, "full", "model")
    if path.startswith("/v1/messages"):
        assert content == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    else:
        assert (content["error"]["message"], content["error"]["code"], content["error"]["param"]) == ("full", 429, "model")


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/chat/completions", None), ("/v1/completions", None), ("/v1/responses", "error"), ("/v1/messages", "error")],
)
def test_a_broken_stream_ends_with_an_error_event_that_its_clients_read(path, name):
    lines = broken_off(path, "gone").decode().strip().split("\n")
    assert (lines[0] == f"event: {name}") == (name is not None)
    content = json.loads(lines[-1].removeprefix("data: "))
    assert content["error"]["message"] == "gone"
    assert broken_off(path, "gone").endswith(b"\n\n")
