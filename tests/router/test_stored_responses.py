import pytest

from router.stored_responses import StoredResponses


@pytest.mark.parametrize(
    "head",
    [
        b'{"id":"resp_1","created_at":1,"output":[]}',
        b'event: response.created\ndata: {"response": {"id": "resp_1", "created_at": 1}, "type": "response.created"}\n\n',
    ],
)
def test_the_worker_that_made_a_response_is_remembered(head):
    stored = StoredResponses()
    stored.made(head, "pool", "w1")
    assert stored.worker_of("resp_1") == ("pool", "w1")


@pytest.mark.parametrize("asked", ["resp_2", "", None, 5, ["resp_1"]])
def test_nobody_is_named_for_what_was_not_seen_made(asked):
    stored = StoredResponses()
    stored.made(b'{"id":"resp_1"}', "pool", "w1")
    stored.made(b'{"error": {"message": "no", "id": "x"}}', "pool", "w2")
    assert stored.worker_of(asked) is None


def test_only_the_newest_are_kept():
    stored = StoredResponses(most=3)
    for i in range(5):
        stored.made(b'{"id":"resp_%d"}' % i, "pool", f"w{i}")
    assert [stored.worker_of(f"resp_{i}") for i in range(5)] == [None, None, ("pool", "w2"), ("pool", "w3"), ("pool", "w4")]
