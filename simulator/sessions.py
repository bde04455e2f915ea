"""What agents say: sessions with a shared system prompt and tools, and a history that only grows. Pure: told by the seed alone.

    template (one of few)      session                          every turn adds
    system prompt + tools  ->  + the user's first task    ->    the answer, then a tool's result or a user's message

So a request's prompt is the previous one's plus something at the end, which is what makes prefix caches worth having. Sub-agents
are short side conversations on the session's own template, started together: they share its prefix and nothing else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simulator.settings import TrafficSettings
from simulator.words import text

TOOL_NAMES = ("read_file", "write_file", "search_code", "run_tests", "list_directory", "fetch_url", "query_database", "send_message")


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of agent."""

    name: str
    tenant: str
    system: str
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, without its transport."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int
    stream: bool


def templates(settings: TrafficSettings) -> list[Template]:
    """The agents of a deployment."""
    made = []
    for n in range(settings.templates):
        rng = random.Random(f"{settings.seed}/template/{n}")
        tools = tuple(
            {
                "type": "function",
                "function": {
                    "name": TOOL_NAMES[(n + k) % len(TOOL_NAMES)] + ("" if k < len(TOOL_NAMES) else f"_{k}"),
                    "description": text(rng, 24),
                    "parameters": {
                        "type": "object",
                        "properties": {"path": {"type": "string"}, "query": {"type": "string"}},
                        "required": ["path"],
                    },
                },
            }
            for k in range(settings.tools)
        )
        made.append(Template(f"agent-{n}", f"tenant-{n % settings.tenants}", text(rng, settings.system_words), tools))
    return made


@dataclass(slots=True)
class AgentSession:
    """One session. Ask with `ask`, give the answer back with `hear`, until `over`."""

    settings: TrafficSettings
    template: Template
    number: int
    turn: int = 0
    turns: int = field(init=False)
    _rng: random.Random = field(init=False)
    _messages: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.settings.seed}/session/{self.number}")
        self.turns = self._rng.randint(*self.settings.turns)
        self._messages = [
            {"role": "system", "content": self.template.system},
            {"role": "user", "content": text(self._rng, self._rng.randint(*self.settings.user_words))},
        ]

    @property
    def session_id(self) -> str:
        return f"session-{self.settings.seed}-{self.number}"

    @property
    def over(self) -> bool:
        return self.turn >= self.turns

    def ask(self) -> Ask:
        """The next request."""
        s = self.settings
        return Ask(
            list(self._messages),
            list(self.template.tools),
            self._rng.randint(*s.answer_tokens),
            self._rng.random() < s.stream_share,
        )

    def hear(self, answer: str, prompt_tokens: int | None) -> None:
        """The answer goes into the history, and after it comes what the next turn brings."""
        s = self.settings
        self.turn += 1
        if prompt_tokens is not None and prompt_tokens >= s.max_prompt_tokens:
            self.turn = self.turns
            return
        self._messages.append({"role": "assistant", "content": answer})
        if self._rng.random() < s.tool_share:
            result = json.dumps({"path": "/src", "out": text(self._rng, self._rng.randint(*s.tool_words))})
            self._messages.append({"role": "tool", "tool_call_id": f"call-{self.turn}", "content": result})
        else:
            self._messages.append({"role": "user", "content": text(self._rng, self._rng.randint(*s.user_words))})

    def think_s(self) -> float:
        return self._rng.uniform(*self.settings.think_s)

    def subagents(self) -> list[Ask]:
        """Side conversations to start together before this turn; mostly none."""
        s = self.settings
        if self._rng.random() >= s.subagent_share:
            return []
        asks = []
        for _ in range(s.subagents):
            task = text(self._rng, self._rng.randint(*s.user_words))
            messages = [{"role": "system", "content": self.template.system}, {"role": "user", "content": task}]
            asks.append(Ask(messages, list(self.template.tools), self._rng.randint(*s.answer_tokens), True))
        return asks


def sessions(settings: TrafficSettings) -> Iterator[AgentSession]:
    """Endless: one session after another, templates drawn by the seed. (In turn they would line up with round robin.)"""
    agents = templates(settings)
    rng = random.Random(f"{settings.seed}/order")
    number = 0
    while True:
        yield AgentSession(settings, rng.choice(agents), number)
        number += 1
