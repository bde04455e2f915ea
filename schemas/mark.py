"""`warmwatch mark`: writes one change to the stream, so that it stands beside the figures it may explain."""

from __future__ import annotations

import sys
import time

from pydantic import Field, ValidationError
from pydantic_settings import CliPositionalArg

from schemas.changes import Change, ChangeKind
from schemas.settings import Settings, SettingsError, explain
from schemas.stream import BadStreamUrl, StreamError, open_stream
from schemas.topics import CHANGES, topic_specs

EXIT_TROUBLE = 1
WRITE_LIMIT_S = 10.0


class MarkSettings(Settings):
    """Notes a change (a deploy, a new prompt, a scale-out) beside the figures: warmwatch mark "rolled out prompt v7" --kind deploy"""

    command = "mark"

    text: CliPositionalArg[str] = Field(description="what changed")
    kind: ChangeKind = Field("note", description="what kind of change it is")
    author: str | None = Field(None, description="who made it")
    pool: str | None = Field(None, description="the pool concerned; default: the whole fleet")
    worker: str | None = Field(None, description="the worker concerned")


def run(settings: MarkSettings) -> int:
    """0 once the change is in the stream; 1 with the reason on stderr when it is not. Raises SettingsError."""
    try:
        change = Change(
            time_s=time.time(), kind=settings.kind, text=settings.text, author=settings.author, pool=settings.pool, worker=settings.worker
        )
    except ValidationError as e:
        raise SettingsError(explain(e)) from e
    try:
        stream = open_stream(settings.stream)
    except BadStreamUrl as e:
        raise SettingsError(f"setting `stream`: {e}") from e
    refused: list[StreamError] = []
    try:
        with stream:
            stream.ensure_topics(topic_specs(settings.topic_prefix))
            writer = stream.writer(on_failure=lambda topic, key, value, error: refused.append(error))
            writer.append(settings.topic_prefix + CHANGES, change.kind.encode(), change.model_dump_json().encode())
            writer.flush(WRITE_LIMIT_S)
        if refused:
            raise refused[0]
    except StreamError as e:
        print(f"warmwatch mark: the change was not written: {e}", file=sys.stderr)
        return EXIT_TROUBLE
    return 0
