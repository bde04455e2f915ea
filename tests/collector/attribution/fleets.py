"""Random small fleets as records of the stream: evictions, requests that overlap, clears, restarts, gaps, stale clocks, two namespaces.

The caches are an own small model: physical copies in order of release, references while a request runs. Each request knows the number of
its own first store, so that the twin need not find it.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from schemas.content import Content
from schemas.kv_events import COMPLETE, ENGINE_RESTARTED, Kind, KvBatch, WorkerId
from schemas.requests import Candidate, Decision, Outcome, pack_hashes, pack_lengths
from schemas.workers import Trust
from tests.collector.batches import Event, batch, event

B = 4
START = 1_790_000_000.0


@dataclass
class Cache:
    who: WorkerId
    capacity: int
    epoch: int = 1
    seq: int = 0
    busy_s: float = 0.0
    """Requests are admitted one after the other, in the order of their dispatch."""
    copies: OrderedDict[int, int] = field(default_factory=OrderedDict)  # copy -> hash, least recently released first
    uses: dict[int, int] = field(default_factory=dict)
    next_copy: int = 0
    batches: list[KvBatch] = field(default_factory=list)

    def publish(self, time_s: float, *events: Event) -> None:
        self.seq += 1
        self.batches.append(batch(self.who, self.epoch, self.seq, time_s, *events))

    def begin(self, time_s: float) -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        self.copies.clear()
        self.uses.clear()
        self.batches.append(batch(self.who, self.epoch, 0, time_s, event(Kind.EPOCH_STARTED, flags=COMPLETE | ENGINE_RESTARTED)))

    def lookup(self, chain: list[int], most: int) -> list[int]:
        found = []
        for h in chain[:most]:
            copy = next((c for c, held in self.copies.items() if held == h), None)
            if copy is None:
                break
            found.append(copy)
        return found

    def allocate(self, hashes: list[int]) -> tuple[list[int], list[int]]:
        """(copies, hashes evicted for them)"""
        evicted, out = [], []
        for h in hashes:
            if len(self.copies) >= self.capacity:
                oldest = next((c for c in self.copies if self.uses[c] == 0), None)
                if oldest is not None:
                    evicted.append(self.copies.pop(oldest))
                    del self.uses[oldest]
            self.next_copy += 1
            self.copies[self.next_copy] = h
            self.uses[self.next_copy] = 1
            out.append(self.next_copy)
        return out, evicted

    def release(self, copies: list[int]) -> None:
        for c in reversed(copies):
            if c in self.copies:  # else it was cleared
                self.uses[c] -= 1
                self.copies.move_to_end(c)


@dataclass
class Asked:
    decision: Decision
    chain: list[int]
    content: Content
    outcome: Outcome | None = None
    own: tuple[WorkerId, int, int] | None = None
    """(worker, number of its batch there, number of the event in that batch) of its first own store."""
    hit: int = 0
    copies: list[int] = field(default_factory=list)


class Fleet:
    """Plays itself when made."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.caches = [Cache(WorkerId("p", f"w{i}", 0), rng.randint(12, 40)) for i in range(rng.randint(2, 5))]
        self.asked: list[Asked] = []
        self.templates = [[rng.randrange(1, 1 << 60) for _ in range(rng.randint(1, 6))] for _ in range(4)]
        self.names: dict[tuple[int, ...], int] = {}
        for c in self.caches:
            c.begin(START)
        todo: list[tuple[float, int, str, object]] = []
        at_s, n = START + 1.0, 0
        for _ in range(rng.randint(30, 60)):
            at_s += rng.random() * 0.5
            todo.append((at_s, n, "ask", None))
            n += 1
            if rng.random() < 0.06:
                todo.append((at_s + 0.05, n, rng.choice(["clear", "restart", "gap"]), rng.choice(self.caches)))
                n += 1
        while todo:
            todo.sort(key=lambda t: t[:2])
            time_s, _, what, value = todo.pop(0)
            if what == "ask":
                asked = self._ask(time_s, n)
                cache = self._cache(asked.decision.worker)
                cache.busy_s = max(time_s, cache.busy_s) + 0.01 + rng.choice([0.0, 0.3, 1.0]) * rng.random()
                todo.append((cache.busy_s, n, "prefill", asked))
            elif what == "prefill":
                assert isinstance(value, Asked)
                self._prefill(value, time_s)
                todo.append((time_s + 0.05 + rng.random(), n, "end", value))
            elif what == "end":
                assert isinstance(value, Asked)
                self._end(value, time_s)
            else:
                assert isinstance(value, Cache)
                self._mishap(what, value, time_s)
            n += 1
        self.end_s = max(a.outcome.time_s for a in self.asked if a.outcome is not None)
        for c in self.caches:
            c.publish(self.end_s + 0.5)  # their bridges are alive

    def _cache(self, worker: str) -> Cache:
        return next(c for c in self.caches if c.who.worker == worker)

    def _name(self, namespace: int, contents: tuple[int, ...]) -> int:
        return self.names.setdefault((namespace, *contents), self.rng.randrange(1, 1 << 63))

    def _ask(self, time_s: float, n: int) -> Asked:
        rng = self.rng
        namespace = rng.choice([1, 1, 1, 2])
        if self.asked and rng.random() < 0.45:  # a conversation goes on
            old = rng.choice(self.asked[-12:])
            namespace = old.content.namespace
            contents = [int(x) for x in old.content.fingerprints] + [rng.randrange(1, 1 << 60) for _ in range(rng.randint(0, 4))]
        else:
            contents = list(rng.choice(self.templates))
            if rng.random() < 0.3:
                contents[0] = rng.randrange(1, 1 << 60)  # a timestamp at the head
            contents += [rng.randrange(1, 1 << 60) for _ in range(rng.randint(0, 3))]
        contents = contents[: rng.randint(1, 12)]
        chain = [self._name(namespace, tuple(contents[: i + 1])) for i in range(len(contents))]
        prompt = len(chain) * B + rng.choice([0, 0, 1, 3])
        lengths = [3, prompt - 3] if prompt > 3 else [prompt]
        chunks = [rng.randrange(1, 1 << 60) for _ in lengths]
        content = Content(namespace, B, 0, prompt, np.array(contents, np.uint64), np.array(chunks, np.uint64), np.array(lengths, np.uint16))
        cache = rng.choice(self.caches)
        clocks = [(b.epoch, b.last_seq) for b in cache.batches if b.bridge_time_s < time_s]
        clock = rng.choice(clocks[-4:]) if clocks and rng.random() < 0.9 else (None, None)
        candidates = []
        for c in self.caches:
            if c is not cache and rng.random() < 0.2:
                continue
            cost = {"cost_s": rng.random()} if seed_has_costs(n) else {"queue_s": rng.random(), "prefill_s": rng.random()}
            mine = {"epoch": clock[0], "seq": clock[1]} if c is cache else {"allowed": rng.random() < 0.9}
            candidates.append(Candidate(worker=c.who.worker, rank=0, trust=Trust.EXACT, **cost, **mine))  # type: ignore[arg-type]  # by name
        decision = Decision(
            request_id=f"q{n:04}", time_s=time_s, router="r", pool="p", model="m", path="/", policy="cost", policy_version="1",
            token_source="exact", prompt_tokens=prompt, block_size=B, chain=pack_hashes(np.array(chain, np.uint64)), namespace=namespace,
            content_from=0, content=pack_hashes(content.fingerprints), chunks=pack_hashes(content.chunks),
            chunk_tokens=pack_lengths(content.chunk_tokens), shared_tokens=rng.choice([None, None, 2]) if prompt > 2 else None,
            worker=cache.who.worker, rank=0, candidates=tuple(candidates),
        )  # fmt: skip
        asked = Asked(decision, chain, content)
        self.asked.append(asked)
        return asked

    def _prefill(self, asked: Asked, time_s: float) -> None:
        cache = self._cache(asked.decision.worker)
        prompt = asked.decision.prompt_tokens or 0
        found = cache.lookup(asked.chain, (prompt - 1) // B)
        asked.hit = len(found)
        for c in found:
            cache.uses[c] += 1
        rest = asked.chain[len(found) :]
        cut = self.rng.randint(1, len(rest)) if self.rng.random() < 0.3 and len(rest) > 1 else len(rest)
        if any(a.chain == asked.chain[: len(found) + cut] for a in self.asked):  # nobody could tell whose it was
            cut = len(rest)
        at_s = time_s
        for part in (rest[:cut], rest[cut:]):
            if not part:
                continue
            copies, evicted = cache.allocate(part)
            done = asked.chain.index(part[0])
            events = [event(Kind.REMOVED, [h]) for h in evicted]
            events.append(event(Kind.STORED, part, parent=asked.chain[done - 1] if done else 999))
            cache.publish(at_s, *events)
            if asked.own is None:
                asked.own = cache.who, len(cache.batches) - 1, len(events) - 1
            found = found + copies
        asked.copies = found

    def _end(self, asked: Asked, time_s: float) -> None:
        d = asked.decision
        self._cache(d.worker).release(asked.copies)
        dice = self.rng.random()
        cached: int | None = asked.hit * B
        if dice < 0.1:
            cached = None
        elif dice < 0.15:
            cached = max(0, asked.hit - 1) * B
        asked.outcome = Outcome(
            request_id=d.request_id, time_s=time_s, worker=d.worker, rank=0, status=200, ttft_s=(time_s - d.time_s) * 0.9,
            prompt_tokens=d.prompt_tokens, cached_tokens=cached, completion_tokens=5,
        )  # fmt: skip

    def _mishap(self, what: str, cache: Cache, time_s: float) -> None:
        if what == "restart":
            cache.begin(time_s)
        elif what == "clear":
            cache.copies.clear()
            cache.uses.clear()
            cache.publish(time_s, event(Kind.CLEARED))
        else:
            cache.batches.append(
                batch(
                    cache.who,
                    cache.epoch,
                    cache.seq + 3,
                    time_s,
                    event(Kind.GAP, seq=cache.seq + 1, parent=cache.seq + 3),
                    first_seq=cache.seq + 1,
                )
            )
            cache.seq += 3


def seed_has_costs(n: int) -> bool:
    return n % 3 != 0
