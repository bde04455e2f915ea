"""`warmwatch mark`: writes one change to the stream, so that it stands beside the figures it may explain."""

from __future__ import annotations

import time

from pydantic import Field, ValidationError
from pydantic_settings import CliPositionalArg

from schemas.changes import Change, ChangeKind
from schemas.settings import Settings, SettingsError, explain
from schemas.stream import StreamError, open_stream
from schemas.topics import CHANGES, topic_specs


class MarkSettings(Settings):
    """Notes a change (a deploy, a new prompt, a scale-out) beside the figures: warmwatch mark "rolled out prompt v7" --kind deploy"""

    command = "mark"

    text: CliPositionalArg[str] = Field(description="what changed")
    kind: ChangeKind = Field("note", description="what kind of change it is")
    author: str | None = Field(None, description="who made it")
    pool: str | None = Field(None, description="the pool concerned; default: the whole fleet")
    worker: str | None = Field(None, description="the worker concerned")


def run(settings: MarkSettings) -> int:
    try:
        change = Change(
            time_s=time.time(), kind=settings.kind, text=settings.text, author=settings.author, pool=settings.pool, worker=settings.worker
        )
    except ValidationError as e:
        raise SettingsError(explain(e)) from e
    try:
        stream = open_stream(settings.stream)
        try:
            stream.ensure_topics(topic_specs(settings.topic_prefix))
            writer = stream.writer()
            writer.append(settings.topic_prefix + CHANGES, change.kind.encode(), change.model_dump_json().encode())
            writer.close(10.0)
        finally:
            stream.close()
    except StreamError as e:
        raise SettingsError(f"the change was not written: {e}") from e
    return 0
