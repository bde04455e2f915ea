"""JSON Schemas of the stream's JSON records, so that other routers and tools can write them, too."""

from __future__ import annotations

import sys
from typing import Any

import orjson
from pydantic import BaseModel

from schemas.changes import Change
from schemas.requests import Decision, Outcome
from schemas.settings import Settings
from schemas.topics import CHANGES, DECISIONS, OUTCOMES, WORKER_LOAD
from schemas.workers import WorkerLoad

MODEL_OF_TOPIC: dict[str, type[BaseModel]] = {DECISIONS: Decision, OUTCOMES: Outcome, WORKER_LOAD: WorkerLoad, CHANGES: Change}


class ExportSettings(Settings):
    """Prints the JSON Schemas of the stream's JSON records, one key a topic."""

    command = "json-schemas"


def json_schemas() -> dict[str, Any]:
    """Topic name -> JSON Schema (2020-12) of its records' values."""
    return {topic: model.model_json_schema(mode="validation") for topic, model in MODEL_OF_TOPIC.items()}


def run(settings: ExportSettings) -> int:
    sys.stdout.buffer.write(orjson.dumps(json_schemas(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return 0
