"""What is known of one request on its way through the router: filled by proxy.py, told by records.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.http.asgi import RawHeaders
from router.http.server import Call
from router.http.usage import Usage
from router.prompts.prompt import Prompt
from schemas.requests import Attempt


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way through the router."""

    request_id: str  # of the records, unique; not always the client's
    id_headers: RawHeaders  # x-request-id as the client gave it, and the recorded one, for every answer
    path: str  # decoded, for records
    target_path: bytes  # with its query, as the client wrote it
    method: str
    header_lines: bytes = field(repr=False)  # that go on to the worker; credentials, perhaps
    body: bytes = field(repr=False)
    client: Call = field(repr=False)
    model: str
    stream: bool | None
    route: str = "default"
    tenant: str = "default"
    template: str | None = None
    session_id: str | None = None
    started_s: float = field(default_factory=time.monotonic)
    dispatched_s: float | None = None  # monotonic, of the newest dispatch
    attempts: list[Attempt] = field(default_factory=list)
    worker: str | None = None
    rank: int | None = None
    status: int | None = None
    error: str | None = None
    ttft_s: float | None = None
    predicted_tokens: int | None = None  # cached tokens as the newest decision forecast them; None: the prefix is unknown
    usage: Usage = field(default_factory=Usage)
    response_bytes: int = 0
    answering: bool = False  # the client has got the head of an answer
    waited_s: float = 0.0  # in the router, for a place at the pool's workers
    continues: str | None = None  # id of the stored response that it belongs to
    tried: set[int] = field(default_factory=set)  # targets that gave no answer, or do not know that response
    decision: dict[str, Any] | None = None  # fields of the newest dispatch's, until it is recorded
    describe: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)  # makes them: the request goes out first
    prompt: Prompt | None = field(default=None, repr=False)
    content: dict[str, Any] | None = None  # what decisions say of the prompt's content, once one was recorded
    snippet: str | None = field(default=None, repr=False)  # of its text, where an operator wants it recorded

    def settle_decision(self) -> None:
        """Its fields are made now. What they tell of the index is as of now, so call it before the event loop goes on."""
        describe, self.describe = self.describe, None
        if describe is not None:
            self.decision = describe()
