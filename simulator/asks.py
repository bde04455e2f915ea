"""What is asked of a fleet in virtual time: requests as names of blocks, in flows that go on when the turn before has ended.

    Flow    starts_s, then turns, each think_s after the end of the one before        closed loop (agents)
            one turn alone at its arrival                                             open loop (Mooncake, RAGPulse)

How a trace becomes names (u64, as schemas.block_hash; equal names mean equal prefixes):

| trace | block | a name is |
|---|---|---|
| Mooncake, Claude Code | 512, 64 tokens | a keyed mix of the chained id: the id stands for the prefix already |
| RAGPulse | 64 tokens | the real chain over made tokens: token j of segment s is a mix of (s, j) |
| LMCache texts | 32 tokens | the real chain over words: each word, space or sign is a token, named by its checksum |

What an answer says is in no trace of ids: its blocks have names of their own and nobody asks for them again. In texts the answer is known.
Sub-agents of Claude Code sessions run where they stand in the file, one turn after the other, not beside their session.

Rejected: token ids for the traces of ids (145 M made tokens for the conversation trace, and their content would be an invention).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.block_hash import U32, U64, HashKey, hash_chain, root_hash, salted_extras
from simulator.traces import MOONCAKE_BLOCK, AgentSession, MooncakeRequest, RagRequest, TextRequest

KEY = HashKey.from_hex("000102030405060708090a0b0c0d0e0f")
"""Of virtual fleets: nothing here is a secret."""
NO_BLOCKS: U64 = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request."""

    chain: U64
    """Names of the prompt's full blocks, shape (prompt_tokens // block size,)."""
    following: U64
    """Names of the blocks that decoding fills, in order, as far as the answer goes."""
    root: int
    """What the first block's chain starts from."""
    prompt_tokens: int
    output_tokens: int
    """At least 1."""
    tokens: U32 | None = None
    """The prompt itself, where it is known; the fleet makes the decision's content of it, and tells it no one."""
    lora: str | None = None
    salt: str | None = None
    route: str = "default"
    tenant: str = "default"
    template: str | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a request has at least one token each way, not {self.prompt_tokens} and {self.output_tokens}")


class Turn(NamedTuple):
    think_s: float
    """After the end of the turn before; of the first turn: after the flow's start."""
    make: Callable[[float], Ask]
    """The request, told the time at which it is sent (unix seconds)."""
    beside: tuple[Flow, ...] = ()
    """Flows that start with this turn: their starts_s counts from its dispatch."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    starts_s: float
    turns: Iterator[Turn]


def one(starts_s: float, ask: Ask) -> Flow:
    """A request of its own."""
    return Flow(starts_s, iter((Turn(0.0, _always(ask)),)))


def mixed(numbers: npt.NDArray[np.uint64], salt: int) -> U64:
    """Names for numbers: splitmix64 of their sum with a salt; equal only for equal numbers (it is a bijection)."""
    x = numbers + np.uint64(salt * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def ask_of_ids(ids: npt.NDArray[np.int64], prompt_tokens: int, output_tokens: int, block: int, number: int, **more: str | None) -> Ask:
    """A request whose blocks have chained ids. number: of the request, for the names of its answer's blocks."""
    full = prompt_tokens // block
    decoded = (prompt_tokens + max(output_tokens, 1) - 1) // block - full
    answer = np.uint64(number) * np.uint64(1 << 20) + np.arange(decoded, dtype=np.uint64)
    chain = mixed(ids[:full].astype(np.uint64), 1)
    return Ask(chain, mixed(answer, 1 << 40), 1, prompt_tokens, max(output_tokens, 1), session_id=more.get("session_id"))


def ask_of_tokens(
    tokens: U32, answer: U32, block: int, pool: str, *, lora: str | None = None, salt: str | None = None, **more: str | None
) -> Ask:
    """A request whose tokens are known, and those of its answer (at least one)."""
    whole = np.concatenate([tokens, answer[:-1]]) if len(answer) > 1 else tokens
    root = root_hash(KEY, pool, lora)
    full = len(tokens) // block
    names = hash_chain(KEY, root, whole, block, salted_extras(KEY, len(whole) // block, salt))
    return Ask(
        names[:full], names[full:], root, len(tokens), max(len(answer), 1), tokens, lora, salt, more.get("route") or "default",
        more.get("tenant") or "default", more.get("template"), more.get("session_id"),
    )  # fmt: skip


def mooncake_flows(requests: Iterable[MooncakeRequest], start_s: float) -> Iterator[Flow]:
    """Open loop: each at its arrival."""
    for n, r in enumerate(requests):
        yield one(start_s + r.arrival_s, ask_of_ids(r.block_ids, r.input_tokens, r.output_tokens, MOONCAKE_BLOCK, n))


def claude_code_flows(sessions: Sequence[AgentSession], starts_s: Sequence[float]) -> Iterator[Flow]:
    """Closed loop: each session from its start (unix seconds) on."""
    number = 0
    for session, start_s in zip(sessions, starts_s, strict=True):
        turns = len(session.turns) + sum(len(a.turns) for a in session.agents)
        numbers = range(number, number + turns)
        number += turns
        yield Flow(start_s, _turns(session, numbers))


def _always(ask: Ask) -> Callable[[float], Ask]:
    return lambda _: ask


def _turns(session: AgentSession, numbers: range) -> Iterator[Turn]:
    for n, turn in zip(numbers, session.in_file_order(), strict=True):
        ids = turn.block_ids(session.base)
        ask = ask_of_ids(ids, turn.input_tokens, turn.output_tokens, session.block_size, n, session_id=session.session_id)
        yield Turn(turn.think_s or 0.0, _always(ask))


def ragpulse_flows(requests: Iterable[RagRequest], start_s: float, pool: str, block: int = 64, faster: float = 1.0) -> Iterator[Flow]:
    """Open loop, the week's arrivals `faster` times as fast. A prompt is its segments; the template's few tokens are left out."""
    for n, r in enumerate(requests):
        at = np.arange(int(r.segment_tokens.sum()), dtype=np.uint64)
        first = np.repeat(np.cumsum(r.segment_tokens) - r.segment_tokens, r.segment_tokens).astype(np.uint64)
        segment = np.repeat(r.segment_ids, r.segment_tokens).astype(np.uint64)
        tokens = (mixed(segment * np.uint64(1 << 20) + (at - first), 2) >> np.uint64(40)).astype(np.uint32)
        answer = (
            mixed(np.uint64(n + 1) * np.uint64(1 << 32) + np.arange(max(r.output_tokens, 1), dtype=np.uint64), 3) >> np.uint64(40)
        ).astype(np.uint32)
        yield one(start_s + r.arrival_s / faster, ask_of_tokens(tokens, answer, block, pool, session_id=r.session_id))


_WORD = re.compile(r"\w+|\s+|[^\w\s]")


def words(text: str) -> U32:
    """A text as tokens: words, spaces and signs by their checksum. Text that is shifted has the same tokens."""
    return np.fromiter((zlib.crc32(w.encode()) for w in _WORD.findall(text)), np.uint32)


def text_flows(requests: Sequence[TextRequest], start_s: float, pool: str, block: int = 32) -> Iterator[Flow]:
    """Open loop at the recorded times, from start_s on. An empty text counts as one space."""
    for r in requests:
        ask = ask_of_tokens(words(r.prompt or " "), words(r.answer or " "), block, pool, session_id=r.session_id)
        yield one(start_s + r.time_s - requests[0].time_s, ask)
