"""Why each block of each request was computed again, told with full knowledge: the rules applied as they are written, one after the other.

A `History` is a fleet's witness: it keeps every deed of every cache in order, every look-up and every decision. Then `truth(request_id)`
asks the rules of each missed block with plain dicts, lists and sets. It is made to be read beside the rules and to hold the collector
against, which sees only records; so it shares no line with the collector's attribution, and it keeps everything, without a bound.

The rules (the table of causes; the first that fits wins). k: blocks delivered, as the engine reports them, else as it looked them up.
The moment: just before the request's own first store. w: the worker that it went to. "Held": as the prefix up to the block.

     1  granularity        the partial last block; the last block of a prompt of whole blocks when all before it was hit
        too_short          a prompt shorter than a block
     2  in_flight          another request, in flight at the dispatch and dispatched before, on a worker that did not hold the block then,
                           stored it afterwards (if that was w: and had not ended at the moment, else it was lost again)
     3  first_seen         no worker had stored it, or one behind it, before the dispatch, and no earlier decision described its content
        diverged           ... one did (whatever became of its request), in the same namespace; namespace: in others alone
        too_short          ... the tokens of the first block that the prompt shares with an earlier one
     -                     a block that was there at the moment, while one before it was not, shares that one's cause
     4  stale_view         w held it at the (epoch, seq) of the router's index
     5  misrouted          another worker held it at the dispatch and cost less; load_bypass: ... and none of them cost less
     6  cleared, evicted   w had it, and lost it by a clear or restart; by an eviction
     7  evicted_elsewhere  some worker had it, never w
     8  unexplained        everything else; and whatever cannot be told: frames of w were lost since its last clear or start, or the hit is
                           not known, or the engine reports fewer than its cache held

A block is held from the batch that published it on, until the batch that published its removal: what a step is about to do is no state yet.
Deeds whose frames were lost are in no state: nobody can know of them (rule 8 says so for the worker's own requests); that a request was
computing something is known nevertheless.
Of a block with tokens of several causes the one with most tokens counts, the first in the order of `Cause` among equals.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from schemas.causes import Cause
from schemas.kv_events import WorkerId
from simulator.asks import Ask
from simulator.fleet import Ended
from simulator.virtual_router import Sent
from simulator.virtual_worker import Deed, Op


@dataclass(frozen=True, slots=True)
class Ladder:
    """Tokens of whole blocks, never the last token: ever stored anywhere before the dispatch; held by some worker at the dispatch; by the
    chosen one at the clock of the router's index; found by the engine. None: cannot be told, as rule
    8 has it, or there is no whole block."""

    ideal: int | None
    held_anywhere: int | None
    selected: int | None
    delivered: int | None


@dataclass(frozen=True, slots=True)
class Truth:
    request_id: str
    prompt_tokens: int
    hit_tokens: int | None
    blocks: tuple[Cause, ...]
    """Of each full block."""
    tail: Cause
    """Of the partial last block."""
    tail_tokens: int
    ladder: Ladder
    why: tuple[str, ...]
    """For each full block the fact that decided, for people who look for a deviation."""

    def tokens(self, block_size: int) -> Counter[Cause]:
        """Cause -> tokens, HIT included; they add up to the prompt's."""
        out: Counter[Cause] = Counter()
        for cause in self.blocks:
            out[cause] += block_size
        out[self.tail] += self.tail_tokens
        return +out


@dataclass(frozen=True, slots=True)
class Batch:
    """What a worker published at once."""

    time_s: float
    first_op: int
    end_op: int


@dataclass(slots=True, eq=False)
class Asked:
    """One request and all that happened to it."""

    sent: Sent
    ask: Ask
    dispatched_s: float
    beside: tuple[str, ...]
    """Requests in flight at its dispatch."""
    chain: list[int]
    moment_op: int | None = None
    """Number of w's next deed when its hit was looked up."""
    hit_blocks: int | None = None
    stored_s: dict[int, float] = field(default_factory=dict)
    """Its own stores: name -> when the first one was published."""
    ended: Ended | None = None

    @property
    def worker(self) -> WorkerId:
        return self.sent.who


@dataclass(slots=True, eq=False)
class Cache:
    """All that ever happened to one worker's cache."""

    batches: list[Batch] = field(default_factory=list)
    emptied: list[tuple[int, Deed]] = field(default_factory=list)
    """Clears and starts: (number of the deed, which)."""
    deeds: dict[int, list[tuple[int, Deed]]] = field(default_factory=lambda: defaultdict(list))
    """Name -> its stores and removals, in order."""
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, seq) -> number of the first deed after that batch."""
    lost: list[Batch] = field(default_factory=list)

    def end_of(self, time_s: float) -> int:
        """Number of the first deed that was not published at time_s."""
        n = bisect.bisect_right(self.batches, time_s, key=lambda b: b.time_s)
        return self.batches[n - 1].end_op if n else 0

    def emptied_before(self, op: int) -> int:
        """Number of the last clear or start before the deed `op`, -1 if there was none."""
        n = bisect.bisect_left(self.emptied, op, key=lambda e: e[0])
        return self.emptied[n - 1][0] if n else -1

    def copies(self, name: int, before: int) -> int:
        """How often the block was held just before the deed `before`."""
        deeds = self.deeds.get(name)
        if deeds is None:
            return 0
        since = self.emptied_before(before)
        return sum(1 if deed is Deed.STORED else -1 for op, deed in deeds if since < op < before)

    def prefix(self, chain: list[int], before: int) -> int:
        """Blocks of the longest prefix held just before the deed `before`."""
        for n, name in enumerate(chain):
            if self.copies(name, before) <= 0:
                return n
        return len(chain)

    def stored_before(self, name: int, before: int) -> bool:
        return any(op < before and deed is Deed.STORED for op, deed in self.deeds.get(name, ()))

    def whole(self, before: int) -> bool:
        """No frame was lost between the last clear or start and the state just before the deed `before`."""
        since = self.emptied_before(before)
        return not any(b.end_op > since and b.first_op < before for b in self.lost)

    def told(self, op: int) -> bool:
        """This deed's frame was not lost."""
        return not any(b.first_op <= op < b.end_op for b in self.lost)


class Facts:
    """What the rules ask about a whole request, each found out once."""

    def __init__(self, history: History, asked: Asked) -> None:
        self.asked = asked
        self._history = history

    @cached_property
    def held(self) -> dict[WorkerId, int]:
        """Blocks of the prefix that each worker held at the dispatch."""
        when_s = self.asked.dispatched_s
        return {who: cache.prefix(self.asked.chain, cache.end_of(when_s)) for who, cache in self._history.caches.items()}

    @cached_property
    def ideal(self) -> int:
        """Blocks of the prefix that had been stored anywhere before the dispatch: a block that was stored tells that those before it were,
        even if their frames were lost."""
        chain, when_s = self.asked.chain, self.asked.dispatched_s
        return max((i + 1 for i, name in enumerate(chain) if self._history.first_stored_s.get(name, math.inf) <= when_s), default=0)

    @cached_property
    def seen(self) -> int | None:
        """Blocks of the prefix that w held at the clock of the router's index (at the dispatch, if it had none); None: frames were lost
        before."""
        cache, clock = self._history.caches[self.asked.worker], self.asked.sent.clock
        if clock is None:
            return self.held[self.asked.worker]
        if not cache.whole(cache.clocks[clock]):
            return None
        return cache.prefix(self.asked.chain, cache.clocks[clock])

    @cached_property
    def moment_s(self) -> float:
        """When the request's own first store was published, else its first byte, else its end."""
        asked = self.asked
        assert asked.ended is not None
        return min(asked.stored_s.values(), default=asked.ended.first_byte_s or asked.ended.time_s)

    @cached_property
    def shared_tokens(self) -> int:
        """Tokens that the first block has in common with an earlier prompt, as the decision says."""
        shared = self.asked.sent.fields.get("shared_tokens") or 0
        return shared if shared < self._history.block_size else 0

    @cached_property
    def content(self) -> list[Cause]:
        """What each token is if its block is new: by the fingerprint of its block and by its chunk. Empty: nothing was told of it."""
        told, asked = self.asked.sent.content, self.asked
        if told is None:
            return []
        spaces: list[set[int]] = [set() for _ in range(told.prompt_tokens)]
        at = told.first_token
        for name in told.fingerprints.tolist():
            known = self._history.known("block", name, asked.dispatched_s)
            for token in range(at, at + told.block_size):
                spaces[token] |= known
            at += told.block_size
        at = told.first_token
        for name, length in zip(told.chunks.tolist(), told.chunk_tokens.tolist(), strict=True):
            known = self._history.known("chunk", name, asked.dispatched_s)
            for token in range(at, at + length):
                spaces[token] |= known
            at += length
        return [Cause.DIVERGED if told.namespace in s else Cause.NAMESPACE if s else Cause.FIRST_SEEN for s in spaces]


class History:
    """A fleet's witness (simulator.fleet.Witness), and the judge."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.asked: dict[str, Asked] = {}
        self.caches: dict[WorkerId, Cache] = defaultdict(Cache)
        self._in_flight: dict[str, None] = {}
        self.first_stored_s: dict[int, float] = {}  # name -> when any worker published its first store
        self._content: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # (kind, name) -> namespace -> first dispatch

    # the witness

    def dispatched(self, sent: Sent, ask: Ask, now_s: float) -> None:
        request_id = str(sent.fields["request_id"])
        self.asked[request_id] = Asked(sent, ask, now_s, tuple(self._in_flight), ask.chain.tolist())
        self._in_flight[request_id] = None
        if sent.content is not None:
            for kind, names in (("block", sent.content.fingerprints), ("chunk", sent.content.chunks)):
                for name in names.tolist():
                    self._content[kind, name].setdefault(sent.content.namespace, now_s)

    def admitted(self, who: WorkerId, request_id: str, hit_blocks: int, op: int) -> None:
        asked = self.asked[request_id]
        asked.moment_op, asked.hit_blocks = op, hit_blocks

    def published(self, who: WorkerId, epoch: int, seq: int, now_s: float, ops: list[Op], lost: bool) -> None:
        cache = self.caches[who]
        batch = Batch(now_s, ops[0].number, ops[-1].number + 1)
        cache.batches.append(batch)
        cache.clocks[epoch, seq] = batch.end_op
        if lost:
            cache.lost.append(batch)
        for op in ops:
            if op.deed is Deed.STORED and op.request_id is not None:
                own = self.asked[op.request_id].stored_s
                for name in op.names.tolist():
                    own.setdefault(name, now_s)
            if lost:
                continue
            if op.deed in (Deed.CLEARED, Deed.BEGUN):
                cache.emptied.append((op.number, op.deed))
            for name in op.names.tolist():
                cache.deeds[name].append((op.number, op.deed))
                if op.deed is Deed.STORED:
                    self.first_stored_s.setdefault(name, now_s)

    def ended(self, ended: Ended) -> None:
        self.asked[ended.request_id].ended = ended
        self._in_flight.pop(ended.request_id, None)

    # the judge

    def truth(self, request_id: str) -> Truth:
        """Raises KeyError for a request that was never dispatched, ValueError for one that has not ended."""
        asked = self.asked[request_id]
        if asked.ended is None:
            raise ValueError(f"{request_id} has not ended")
        size, prompt = self.block_size, asked.ask.prompt_tokens
        n = len(asked.chain)
        tail_tokens = prompt - n * size
        k, facts = self._delivered(asked), Facts(self, asked)
        if k is None:
            why = ("the hit is not known",) * n
            ladder = self._ladder(facts, None)
            return Truth(request_id, prompt, None, (Cause.UNEXPLAINED,) * n, Cause.UNEXPLAINED, tail_tokens, ladder, why)
        told: list[tuple[Cause, str]] = []
        for i in range(n):
            told.append(self._cause(facts, i, k, told[-1][0] if i > k else None))
        tail = Cause.TOO_SHORT if n == 0 else Cause.GRANULARITY
        causes, why = tuple(c for c, _ in told), tuple(w for _, w in told)
        return Truth(request_id, prompt, k * size, causes, tail, tail_tokens, self._ladder(facts, k * size), why)

    def _delivered(self, asked: Asked) -> int | None:
        """k: the engine's report, else what events tell: nothing when frames were lost before the moment."""
        assert asked.ended is not None
        if asked.ended.status != 200:
            return None
        if asked.ended.cached_tokens is not None:
            return asked.ended.cached_tokens // self.block_size
        return asked.hit_blocks if self._tellable(asked) else None

    def _tellable(self, asked: Asked) -> bool:
        cache, op = self.caches[asked.worker], asked.moment_op
        return op is not None and cache.whole(op) and cache.told(op)

    def _ladder(self, facts: Facts, delivered: int | None) -> Ladder:
        if not self._tellable(facts.asked) or not facts.asked.chain:
            return Ladder(None, None, None, delivered)
        size = self.block_size
        most = max(facts.asked.ask.prompt_tokens - 1, 0) // size
        ideal, held = (min(blocks, most) * size for blocks in (facts.ideal, max(facts.held.values())))
        return Ladder(ideal, held, None if facts.seen is None else min(facts.seen, most) * size, delivered)

    def _cause(self, facts: Facts, i: int, k: int, before: Cause | None) -> tuple[Cause, str]:
        """before: of the block before, if it was computed, too."""
        asked = facts.asked
        name, own = asked.chain[i], self.caches[asked.worker]
        if i < k:
            return Cause.HIT, "delivered"

        # 1: the last block of a prompt of whole blocks, all before it hit
        if i == len(asked.chain) - 1 and k == i and asked.ask.prompt_tokens % self.block_size == 0:
            return Cause.GRANULARITY, "an engine computes the last token"

        # 8, before all that asks for w's state
        if not self._tellable(asked):
            return Cause.UNEXPLAINED, "frames of this worker were lost"
        assert asked.moment_op is not None
        assert asked.hit_blocks is not None
        if i < asked.hit_blocks:
            return Cause.UNEXPLAINED, "the engine reports fewer than its cache held"

        # 2: somebody else is computing it
        for other_id in asked.beside:
            other = self.asked[other_id]
            if name not in other.stored_s or other.stored_s[name] <= asked.dispatched_s or facts.held[other.worker] > i:
                continue
            if other.worker != asked.worker or other.ended is None or other.ended.time_s > facts.moment_s:
                return Cause.IN_FLIGHT, f"{other_id} stored it at {other.stored_s[name]:.4f}"

        # 3: new
        if i >= facts.ideal:
            return self._new(facts, i)

        # held, but not what comes before it
        if own.copies(name, asked.moment_op) > 0:
            return (Cause.UNEXPLAINED if before is None else before), "held, but not what comes before it"

        # 4: the router's view was stale
        if facts.seen is not None and facts.seen > i:
            return Cause.STALE_VIEW, f"held at {asked.sent.clock}"

        # 5: another worker held it
        elsewhere = [who for who, blocks in facts.held.items() if who != asked.worker and blocks > i]
        if elsewhere:
            cheaper = any(self._cheaper(asked, who) for who in elsewhere)
            return Cause.MISROUTED if cheaper else Cause.LOAD_BYPASS, f"held by {', '.join(map(str, elsewhere))}"

        # 6: w lost it
        if own.stored_before(name, asked.moment_op):
            last = max(op for op, _ in own.deeds[name] if op < asked.moment_op)
            if own.emptied_before(asked.moment_op) > last:
                return Cause.CLEARED, "cleared or restarted"
            return Cause.EVICTED, f"deed {last}"

        # 7: others had it
        return Cause.EVICTED_ELSEWHERE, f"first stored at {self.first_stored_s[name]:.4f}"

    def _new(self, facts: Facts, i: int) -> tuple[Cause, str]:
        """Its tokens by what was known of their content before the dispatch; the kind with most of them."""
        tokens = facts.content[i * self.block_size : (i + 1) * self.block_size]
        if not tokens:
            return Cause.FIRST_SEEN, "no content is told"
        if i == 0:
            tokens = [Cause.TOO_SHORT] * facts.shared_tokens + tokens[facts.shared_tokens :]
        count = Counter(tokens)
        most = max(count, key=lambda c: (count[c], -c))
        return most, f"{dict(count)}"

    def known(self, kind: str, name: int, before_s: float) -> set[int]:
        """Namespaces in which decisions before this time described the content."""
        return {space for space, time_s in self._content.get((kind, name), {}).items() if time_s < before_s}

    def _cheaper(self, asked: Asked, who: WorkerId) -> bool:
        """By the decision's candidates. Who cannot be chosen is no cheaper choice."""
        costs = {(c["worker"], c["rank"]): c for c in asked.sent.fields["candidates"]}
        theirs, ours = costs.get((who.worker, who.rank)), costs[asked.worker.worker, asked.worker.rank]
        if theirs is None:  # the decision lists the best: who is not listed is dearer than those
            others = [_cost_s(c) for c in costs.values() if c is not ours and c["allowed"]]
            return max(others, default=math.inf) < _cost_s(ours)
        return bool(theirs["allowed"]) and _cost_s(theirs) < _cost_s(ours)


def _cost_s(candidate: dict[str, Any]) -> float:
    """As the policy reckoned, else (a policy without costs) by the cost model's terms."""
    if candidate["cost_s"] is not None:
        return float(candidate["cost_s"])
    return float(0.5 * candidate["queue_s"] + candidate["prefill_s"] + candidate["load_s"] + candidate["decode_s"])
