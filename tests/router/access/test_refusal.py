"""The form of a refusal. That real clients raise their own errors for it: test_access.py."""

import pytest

from router.access.refusal import REASONS, Refused


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_has_both_forms(reason):
    refused = Refused(reason, "because", retry_after_s=0.2)
    assert refused.content("/v1/chat/completions")["error"]["message"] == "because"
    assert refused.content("/v1/messages")["error"].keys() == {"type", "message"}
    assert refused.content("/v1/messages/count_tokens")["type"] == "error"
    headers = dict(refused.answer_headers())
    assert headers[b"retry-after"] == b"1"
    assert (b"www-authenticate" in headers) == (refused.status == 401)
