"""Prompts as agents send them, for the routers' benchmark: told by a seed, the same for every router.

    4 agents (system prompt, tools)  ->  64 sessions, each with a history of its own  ->  4 turns, each the last one's history and more

So every prompt shares its beginning with others: the system prompt with all sessions of its agent, all but the end with its own session.
A prompt's last message is a run of `~` in the file: the load generator puts words there, the same each time or new ones for each request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.sessions import TOOL_NAMES
from simulator.words import WORDS

MODEL = "bench-model"
AGENTS = 4
SESSIONS = 64
TURNS = 4
PROMPTS = SESSIONS * TURNS
ANSWER_TOKENS = 15


def write_prompts(path: Path, body_bytes: int, seed: int = 1) -> None:
    """One request body a line, turn by turn: all sessions' first, then all their second prompts. The last turn's bodies have `body_bytes`
    bytes, the first turn's about a fifth less."""
    sessions = [_Session(body_bytes, number, seed) for number in range(SESSIONS)]
    with path.open("w") as file:
        for turn in range(TURNS):
            for session in sessions:
                file.write(json.dumps(session.body(turn), separators=(",", ":")) + "\n")


class _Session:
    def __init__(self, body_bytes: int, number: int, seed: int) -> None:
        agent = number % AGENTS
        of_agent, own = random.Random(f"{seed}/{body_bytes}/agent/{agent}"), random.Random(f"{seed}/{body_bytes}/session/{number}")
        self._last = "~" * min(200, body_bytes // 8)
        self._tools = [_tool(of_agent, name) for name in TOOL_NAMES[agent : agent + (4 if body_bytes > 4096 else 0)]]
        system = {"role": "system", "content": _text(of_agent, min(body_bytes // 5, 8192))}
        empty = self._body([system], self._last)
        room = body_bytes - len(json.dumps(empty, separators=(",", ":")))
        history = list(_history(own, room, min(1500, max(60, body_bytes // 30))))
        self._messages = [system, *history]
        a_turn = max(1, len(history) // 5 // (TURNS - 1))
        self._ends = [len(self._messages) - a_turn * (TURNS - 1 - turn) for turn in range(TURNS)]

    def body(self, turn: int) -> dict[str, Any]:
        return self._body(self._messages[: self._ends[turn]], self._last)

    def _body(self, messages: list[dict[str, Any]], last: str) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": last}], "model": MODEL, "max_tokens": ANSWER_TOKENS}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7}
        return body | ({"tools": self._tools} if self._tools else {})


def _history(rng: random.Random, room: int, about: int) -> Iterator[dict[str, Any]]:
    """User, assistant, user, ... until `room` bytes of JSON are full."""
    turn = 0
    while room > 0:
        message = {"role": ("user", "assistant")[turn % 2], "content": ""}
        overhead = len(json.dumps(message, separators=(",", ":"))) + 1
        size = rng.randint(about // 2, about * 3 // 2)
        if room - overhead - size < overhead + about // 2:
            size = max(1, room - overhead)
        message["content"] = _text(rng, size)
        yield message
        room -= overhead + size
        turn += 1


def _text(rng: random.Random, size: int) -> str:
    """Words, to the very character."""
    words = " ".join(rng.choices(WORDS, k=size // 3 + 1))
    return words[:size].ljust(size, ".")


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "query": {"type": "string"}}, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": _text(rng, 120), "parameters": parameters}}
