"""Readers of public request traces: who asked when, for how many tokens, and which parts of the prompt were the same as before.

| reader | trace | a prompt is | equal ids mean |
|---|---|---|---|
| `mooncake` | Mooncake, FAST'25 | chained ids, 512 tokens each, the last one perhaps partial | the same prefix up to the block's end |
| `claude_code` | kv-cache-tester, Claude Code | runs of chained ids, 64 tokens each, full blocks only | the same, inside one session |
| `ragpulse` | RAGPulse | segments with lengths of their own | the same content, at any place |
| `lmcache_agents` | LMCache agent traces | the text itself | - |

Times are seconds from the trace's start (LMCache: unix seconds), lengths tokens. None: the trace does not say. Records come in the file's
order, which is not always the order of time (RAGPulse). Every error is a BadTrace that names file and line; a trace is never read in part.
Formats and licences of the files stand with them. Reading holds one trace in memory: up to 40 MB of arrays, LMCache 20 MB of text.

Rejected: one record for all traces. A chained id and a content id answer different questions, and a reader who mixes them gets wrong
prefixes silently; what can be made of each (`fleet`) is written down where it is made.
"""

from __future__ import annotations

import gzip
import json
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

MOONCAKE_BLOCK = 512
PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""Of a RAGPulse prompt, in their order."""
_RAG_LENGTHS = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")


class BadTrace(ValueError):  # noqa: N818 - named for what it is
    """A trace file cannot be read; the message names file and line, and what is wrong there."""


@dataclass(frozen=True, slots=True, eq=False)
class MooncakeRequest:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: I64
    """Shape (ceil(input_tokens / 512),); chained; the last one is partial unless the length is a multiple of 512."""

    @property
    def full_blocks(self) -> int:
        return self.input_tokens // MOONCAKE_BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call of an agent to its model."""

    at_s: float
    """From the start of its session; of a sub-agent's turn: from the sub-agent's start."""
    model: str
    input_tokens: int
    output_tokens: int
    runs: I64
    """[start, count]: ids start .. start + count - 1, shape (runs, 2)."""
    streamed: bool
    api_s: float | None
    think_s: float | None
    """Pause between the end of the turn before and this one."""
    ttft_s: float | None

    @property
    def blocks(self) -> int:
        return int(self.runs[:, 1].sum())

    def block_ids(self, base: int = 0) -> I64:
        """Chained ids of its full blocks, shape (blocks,); `base` is added to each (see `AgentSession.base`)."""
        counts = self.runs[:, 1]
        starts = np.repeat(self.runs[:, 0] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        return np.asarray(starts + np.arange(len(starts)) + base, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SubAgent:
    agent_id: str
    kind: str
    starts_s: float
    """From the start of its session."""
    after_turns: int
    """How many turns of the session stand before it in the file."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AgentSession:
    session_id: str
    block_size: int
    tool_tokens: int
    system_tokens: int
    base: int
    """Added to the session's ids, it makes them unique in the whole trace."""
    turns: tuple[Turn, ...]
    agents: tuple[SubAgent, ...]

    def in_file_order(self) -> Iterator[Turn]:
        """Turns of the session and of its sub-agents, as they stand in the file."""
        at = 0
        for agent in self.agents:
            yield from self.turns[at : agent.after_turns]
            yield from agent.turns
            at = agent.after_turns
        yield from self.turns[at:]


@dataclass(frozen=True, slots=True, eq=False)
class RagRequest:
    arrival_s: float
    input_tokens: int
    """As reported: a few more than the segments have, the chat template's."""
    output_tokens: int
    session_id: str
    segment_ids: I64
    """Content ids, not chained, unique over all parts, shape (segments,)."""
    segment_tokens: I32
    segment_parts: U8
    """Index into `PARTS`."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    time_s: float
    """Unix seconds."""
    session_id: str
    prompt: str
    answer: str


def mooncake(path: Path) -> list[MooncakeRequest]:
    """Reads conversation_trace.jsonl(.gz) or synthetic_trace.jsonl(.gz)."""
    out = []
    for line in _lines(path):
        tokens = line.count("input_length")
        ids = np.asarray(line.take("hash_ids", list), np.int64)
        if len(ids) != -(-tokens // MOONCAKE_BLOCK):
            raise line.bad(f"{len(ids)} hash_ids for {tokens} tokens of input_length")
        out.append(MooncakeRequest(line.number("timestamp") / 1000, tokens, line.count("output_length"), ids))
    return out


def claude_code(path: Path) -> list[AgentSession]:
    """Reads claude_code_710.runs.jsonl(.gz)."""
    out: list[AgentSession] = []
    base = 0
    for line in _lines(path):
        size = line.count("block_size")
        turns: list[Turn] = []
        agents: list[SubAgent] = []
        top = 0
        for entry in line.entries("requests"):
            if entry.take("type", str) != "subagent":
                turns.append(_turn(entry, size))
                continue
            own = tuple(_turn(e, size) for e in entry.entries("requests"))
            agents.append(SubAgent(entry.take("agent_id", str), entry.take("subagent_type", str), entry.number("t"), len(turns), own))
        session = AgentSession(
            line.take("id", str), size, line.count("tool_tokens"), line.count("system_tokens"), base, tuple(turns), tuple(agents)
        )
        for turn in session.in_file_order():
            if len(turn.runs):
                top = max(top, int(turn.runs.sum(axis=1).max()))
        base += top
        out.append(session)
    return out


def _turn(entry: _Line, block_size: int) -> Turn:
    runs = np.asarray(entry.take("hash_runs", list), np.int64).reshape(-1, 2)
    tokens = entry.count("in")
    if (runs[:, 1] < 1).any() or runs[:, 1].sum() != tokens // block_size:
        raise entry.bad(f"hash_runs name {int(runs[:, 1].sum())} blocks for {tokens} tokens of in")
    return Turn(
        entry.number("t"), entry.take("model", str), tokens, entry.count("out"), runs, entry.take("type", str) == "s",
        entry.perhaps("api_time"), entry.perhaps("think_time"), entry.perhaps("ttft"),
    )  # fmt: skip


def ragpulse(folder: Path) -> list[RagRequest]:
    """Reads 0_trace.jsonl(.gz) and the five files of lengths beside it."""
    length: dict[int, int] = {}
    for name in _RAG_LENGTHS:
        for line in _lines(_either(folder / f"{name}.jsonl")):
            (key,) = [k for k in line.value if k.endswith("_id")] or [""]
            length[line.count(key)] = line.count("token_length")
    out = []
    for line in _lines(_either(folder / "0_trace.jsonl")):
        named = line.take("hash_ids", dict)
        ids = [(i, part) for part, name in enumerate(PARTS) for i in named.get(name, ())]
        lost = [i for i, _ in ids if i not in length]
        if lost or set(named) - set(PARTS):
            raise line.bad(f"segments without a length: {lost[:5]}, unknown parts: {sorted(set(named) - set(PARTS))}")
        out.append(
            RagRequest(
                line.number("timestamp"), line.count("input_length"), line.count("output_length"), line.take("session_id", str),
                np.array([i for i, _ in ids], np.int64), np.array([length[i] for i, _ in ids], np.int32),
                np.array([part for _, part in ids], np.uint8),
            )
        )  # fmt: skip
    return out


def lmcache_agents(archive: Path, folders: Sequence[str] = ("miniswe", "magagent", "taubench")) -> dict[str, list[TextRequest]]:
    """Reads lmcache_agent_trace.tar.xz; folder -> its requests in the order of their time (one file there is one session)."""
    out: dict[str, list[TextRequest]] = {name: [] for name in folders}
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                kind = member.name.removeprefix("./").split("/")[0]
                file = tar.extractfile(member) if kind in out and member.isfile() else None
                if file is None:
                    continue
                for line in _numbered(f"{archive.name}:{member.name}", file.read().decode("utf-8").splitlines()):
                    out[kind].append(
                        TextRequest(
                            line.number("timestamp") / 1e6, line.take("session_id", str), line.take("input", str), line.take("output", str)
                        )
                    )
    except (OSError, tarfile.TarError, lzma.LZMAError, UnicodeDecodeError) as e:
        raise BadTrace(f"{archive} cannot be read: {e}") from e
    empty = [name for name, requests in out.items() if not requests]
    if empty:
        raise BadTrace(f"{archive} has no folder {', '.join(empty)}")
    for requests in out.values():
        requests.sort(key=lambda r: r.time_s)
    return out


class _Line:
    """One JSON object with the place that it stands at."""

    __slots__ = ("place", "value")

    def __init__(self, place: str, value: Any) -> None:
        self.place = place
        if not isinstance(value, dict):
            raise self.bad("no JSON object")
        self.value: dict[str, Any] = value

    def bad(self, why: str) -> BadTrace:
        return BadTrace(f"{self.place}: {why}")

    def take(self, key: str, kind: type) -> Any:
        value = self.value.get(key)
        if not isinstance(value, kind):
            raise self.bad(f"{key} must be a {kind.__name__}, got {value!r:.80}")
        return value

    def number(self, key: str) -> float:
        """RAGPulse writes times as text."""
        try:
            return float(self.value[key])
        except (KeyError, TypeError, ValueError):
            raise self.bad(f"{key} must be a number, got {self.value.get(key)!r:.80}") from None

    def perhaps(self, key: str) -> float | None:
        return None if self.value.get(key) is None else self.number(key)

    def count(self, key: str) -> int:
        value = self.value.get(key)
        if not isinstance(value, int) or value < 0:
            raise self.bad(f"{key} must be a whole number and not negative, got {value!r:.80}")
        return value

    def entries(self, key: str) -> Iterator[_Line]:
        for n, entry in enumerate(self.take(key, list)):
            yield _Line(f"{self.place}, {key}[{n}]", entry)


def _either(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    return packed if packed.exists() else path


def _lines(path: Path) -> Iterator[_Line]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as packed:
                yield from _numbered(path.name, packed)
        else:
            with path.open(encoding="utf-8") as plain:
                yield from _numbered(path.name, plain)
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise BadTrace(f"{path} cannot be read: {e}") from e


def _numbered(name: str, lines: Iterator[str] | Sequence[str] | Any) -> Iterator[_Line]:
    for n, text in enumerate(lines, 1):
        if not text.strip():
            continue
        place = f"{name}:{n}"
        try:
            value = json.loads(text)
        except json.JSONDecodeError as e:
            raise BadTrace(f"{place}: no JSON: {e}") from e
        yield _Line(place, value)
