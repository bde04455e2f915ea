"""A pool as the router runs it, and the decision: tokens -> chain -> overlap -> cost -> worker.

    Prompt (prompts/) ---------------+
    PrefixIndex.match ---------------+--> Situation -> terms -> Policy.choose -> Decided -> (dispatch) -> Decision record
    PoolLoad, Health, trust ---------+

No await here: a decision sees one consistent state, since all of it lives on one event loop.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.frozen import value
from router.http.usage import Usage
from router.index.approximate import ApproximateIndex
from router.index.prefix_index import BLIND, DEGRADED, PrefixIndex, Slot
from router.index.table import DEFAULT_LIMIT_BYTES, MAX_SLOTS, Overlaps
from router.policy.book import CoefficientBook
from router.policy.cold import ColdCaps
from router.policy.cost import F64, Coefficients, Mask, Situation, Terms, most_cached_tokens, table_of, terms
from router.policy.eligible import eligible
from router.policy.fit import prefill_seconds
from router.policy.others import OthersLoad
from router.policy.policies import POLICIES, Choice, Policy
from router.policy.rules import PolicyRules
from router.policy.shadows import ShadowPick, Shadows
from router.policy.view import SlotMap, tokens_by_target, trust_by_target
from router.prompts.prompt import Prompt
from router.prompts.served import ServedModels
from router.prompts.tokens import LocalTokenizer
from router.workers.admission import Admission
from router.workers.health import Health
from router.workers.load import PoolLoad
from router.workers.retry_budget import RetryBudget
from router.workers.rules import WorkerRules
from router.workers.targets import Target, renumbered, targets_of
from schemas.block_hash import U64, HashKey, hash_chain, root_hash, salted_extras
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import WorkerId
from schemas.workers import WorkerLoad

log = logging.getLogger(__name__)

_MOST_STRANGERS = 64
"""Workers and ranks that the index follows though they belong to no pool (yet, or any more)."""
_MOST_MEMBERS = MAX_SLOTS - _MOST_STRANGERS


class TooManyWorkers(ValueError):  # noqa: N818 - a value, named for what it is
    """More workers and ranks than the index follows."""


class PoolState:
    """One pool: its targets, load, health, policy and tokenizer. block_size None: not learned yet, so no chains.

    Arrays are by target number. A target that is gone keeps its place in `targets` until another takes it, with `present` False; what was
    on its way there ends as if it were not gone.
    """

    def __init__(
        self,
        spec: Pool,
        workers: Sequence[Worker],
        tokenizer: LocalTokenizer | None,
        policy: Policy,
        index: PrefixIndex,
        key: HashKey,
        rules: WorkerRules,
        choose_rank: bool,
        policy_rules: PolicyRules,
    ) -> None:
        self.name, self.model, self.tokenizer, self.policy = spec.name, spec.model_name, tokenizer, policy
        self.targets: tuple[Target, ...] = ()
        self.present: Mask = np.zeros(0, np.bool_)
        self.draining: Mask = np.zeros(0, np.bool_)
        self.added_s: F64 = np.zeros(0)
        """When a target joined, monotonic seconds; -inf: nobody was there before it."""
        self.load = PoolLoad(0)
        self.health = Health((), rules.breaker)
        self.retries = RetryBudget(rules.retry_ratio, rules.retry_burst)
        self.admission = Admission(self._places, rules.max_queue, rules.max_queue_wait_s)
        self.block_size: int | None = None
        self.block_size_conflicts = 0
        self.newest_load: dict[tuple[str, int], WorkerLoad] = {}
        self._spec, self._index, self._choose_rank, self._max_in_flight = spec, index, choose_rank, rules.max_in_flight
        self.sources: dict[WorkerId, Slot] = {}
        self._slots: tuple[tuple[Slot, ...], ...] = ()
        self.shadows = Shadows()
        self.cold = ColdCaps(policy_rules.cold_tokens_per_s, policy_rules.cold_s)
        self.others = OthersLoad(policy_rules.engine_load_fresh_s)
        self._seats: _Seats | None = None
        self._new: tuple[int, ...] = ()
        self._new_until_s = self._new_looked_s = -math.inf
        self.served: ServedModels | None = None  # by its workers' own word, once one has answered
        self.key = self._key = key
        self.key_id = key.key_id
        self._roots: dict[str | None, int] = {}
        self.set_workers(workers, -math.inf)

    def set_workers(self, workers: Sequence[Worker], now_s: float) -> tuple[Slot, ...]:
        """These are the pool's workers from the next decision on. Who stays (same name, address and ranks) keeps number, load, health and
        blocks. Returns the index slots of those who are gone, which are the caller's to release. Raises TooManyWorkers, and then nothing
        has changed. now_s: monotonic seconds."""
        wanted = targets_of(self._spec, workers, self._choose_rank)
        if len({s for t in wanted for s in t.sources} - self.sources.keys()) > _MOST_MEMBERS - len(self._index.slots):
            raise TooManyWorkers(f"the router follows at most {_MOST_MEMBERS} workers and ranks of all pools, those lately gone among them")
        before, since_s = self.targets, now_s if self.present.any() else -math.inf
        self.targets, present = renumbered(self.targets, self.present.tolist(), wanted, lambda n: not self.load.in_flight[n])
        joined = [t.number for t in self.targets if t.number >= len(before) or t is not before[t.number]]
        grown = len(self.targets) - len(before)
        self.present = np.array(present, np.bool_)
        self.draining = np.concatenate([self.draining, np.zeros(grown, np.bool_)]) & self.present
        self.added_s = np.concatenate([self.added_s, np.zeros(grown)])
        self.draining[joined], self.added_s[joined] = False, since_s
        for number in joined:
            self.others.gone(number)
        self.load.grow(len(self.targets))
        released = self._seat()
        self.health.set_targets(self.targets, self.present)
        self.admission.look()
        return released

    def _seat(self) -> tuple[Slot, ...]:
        """Index slots by target. A target that is gone keeps the ones that it had, which nobody reads for it any more."""
        here = dict.fromkeys(source for t in self.targets if self.present[t.number] for source in t.sources)
        gone = tuple(slot for source, slot in self.sources.items() if source not in here)
        for slot in gone:
            self.newest_load.pop((slot.source.worker, slot.source.rank), None)
        old = {t.number: slots for t, slots in zip(self.targets, self._slots, strict=False)}
        self.sources = {s: self._index.slot(s) for s in here}
        self._slots = tuple(tuple(self.sources[s] for s in t.sources) if self.present[t.number] else old[t.number] for t in self.targets)
        return gone

    def here(self) -> list[Target]:
        """Targets that are present."""
        return [t for t in self.targets if self.present[t.number]]

    def drain(self, worker: str, on: bool = True) -> None:
        """A worker that drains takes only what goes on there (policy/eligible.py), until it is taken out or the drain is taken back."""
        for t in self.targets:
            if t.worker == worker:
                self.draining[t.number] = on and bool(self.present[t.number])

    def busy(self, worker: str) -> int:
        """Requests on their way to this worker, over its ranks."""
        return sum(int(self.load.in_flight[t.number]) for t in self.targets if t.worker == worker and self.present[t.number])

    def allowed(self, excluded: Iterable[int], now_s: float) -> Mask:
        """Who may take a request: present, up, with a place (max_in_flight), and not excluded. When nobody is left, places don't count,
        and when nobody is up either, all that are present and not excluded may be tried: a breaker is a guess, and 503 helps nobody."""
        up = self.health.up_at(now_s)
        able = up & (self.load.own() < self._max_in_flight) if self._max_in_flight else up.copy()
        for i in excluded:
            able[i] = False
        if not able.any():
            for others in (up, self.present):
                able = others.copy()
                for i in excluded:
                    able[i] = False
                if able.any():
                    break
        return able

    def has_others(self, target: Target, tried: Iterable[int]) -> bool:
        """Whether a request that goes to this target could still go to another process that is up, without those tried."""
        left = self.health.up.copy()
        left[list(tried)] = False
        return any(left[t.number] and t.url != target.url for t in self.targets)

    def _places(self) -> int | None:
        """For how many requests there is a place: `max_in_flight` at each worker that takes new ones, and one for each that is on its way
        to another (hung, draining, gone) or beyond that number, for these take no place from the rest."""
        if not self._max_in_flight:
            return None
        up = self.health.up_at(time.monotonic())
        takes = next((some for some in (up & ~self.draining, up, self.present) if some.any()), None)
        own = self.load.own()
        if takes is None:  # let in to be told that there is nobody
            return int(own.sum()) + 1
        return int(np.where(takes, np.maximum(own, self._max_in_flight), own).sum())

    def seats(self, book: CoefficientBook) -> _Seats:
        """What the decision needs of the targets, made anew when they or their coefficients changed."""
        found = self._seats
        if found is None or found.targets is not self.targets or found.edition != book.edition:
            used = [book.in_use(self.name, t.hardware) for t in self.targets]
            found = self._seats = _Seats(
                self.targets, book.edition,
                SlotMap.of([[s.number for s in slots] for slots in self._slots]),
                np.array([_name_key(f"{t.worker}/{t.rank}") for t in self.targets], np.uint64),
                table_of([v.rates for v in used]), tuple(v.name for v in used),
            )  # fmt: skip
            self._new_until_s = float(self.added_s.max(initial=-math.inf)) + self.cold.new_s
            self._new_looked_s = -math.inf
        return found

    def new_targets(self, now_s: float) -> tuple[int, ...]:
        """Who joined less than `cold_s` ago and holds less than half as many blocks as the median worker. Looked at four times a second."""
        if now_s >= self._new_until_s:
            return ()
        if now_s - self._new_looked_s > 0.25:
            self._new_looked_s = now_s
            held = [
                sum(self._index.held_blocks(s.number) for s in slots) if here else -1
                for slots, here in zip(self._slots, self.present, strict=True)
            ]
            median = float(np.median([h for h in held if h >= 0] or [0]))
            joined = np.flatnonzero(self.present & (now_s - self.added_s < self.cold.new_s))
            self._new = tuple(t for t in joined.tolist() if 2 * held[t] < median)
        return self._new

    def slots_of(self, target: int) -> tuple[Slot, ...]:
        return self._slots[target]

    def tells_nothing(self) -> bool:
        """No worker has KV events (as far as it was heard): what they hold is guessed from what was sent to them."""
        return all(slot.epoch is None for slot in self.sources.values())

    def learn_block_size(self, block_size: int) -> None:
        """The first word counts, until no worker's events say so any more (all were restarted with another size). Until then a different
        one is counted: that worker's blocks match no prompt."""
        if self.block_size == block_size:
            return
        if self.block_size is None or all(s.block_size in (None, block_size) for s in self.sources.values()):
            log.info("pool %s: blocks of %d tokens (before: %s)", self.name, block_size, self.block_size)
            self.block_size = block_size
            return
        if not self.block_size_conflicts:
            log.warning("pool %s: a worker has blocks of %d tokens, the pool of %d", self.name, block_size, self.block_size)
        self.block_size_conflicts += 1

    def chain(self, ids: npt.NDArray[np.uint32], lora: str | None, salt: str | None, known: U64 | None = None) -> U64 | None:
        """Names of the prompt's full blocks; None while the block size is unknown. known: names of its first blocks, of the same size,
        adapter and salt."""
        if self.block_size is None:
            return None
        root = self._root(lora)
        if known is not None and len(known):
            if len(ids) // self.block_size == len(known):
                return known
            new = hash_chain(self._key, int(known[-1]), ids[len(known) * self.block_size :], self.block_size)
            return np.concatenate([known, new])
        return hash_chain(self._key, root, ids, self.block_size, salted_extras(self._key, len(ids) // self.block_size, salt))

    def other_chains(self, ids: npt.NDArray[np.uint32], lora: str | None, salt: str | None) -> dict[int, U64]:
        """The same by the other block sizes that attention groups of hybrid models have; mostly none."""
        return {
            size: hash_chain(self._key, self._root(lora), ids, size, salted_extras(self._key, len(ids) // size, salt))
            for size in self._index.other_sizes
        }

    def _root(self, lora: str | None) -> int:
        root = self._roots.get(lora)
        if root is None:
            root = root_hash(self._key, self.name, lora)
            if len(self._roots) < 4096:
                self._roots[lora] = root
        return root


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """Of a pool's targets, by number: slots, names as numbers, rates and the version that these come from."""

    targets: tuple[Target, ...]
    edition: int
    slots: SlotMap
    keys: U64
    rates: F64
    versions: tuple[str, ...]


@value()
class Decided:
    """A choice with all that it was made from. coefficients_version: of the chosen target's rates. cached_tokens: of the prompt there,
    confirmed and expected, as the engine would report it. decide_us: shadows included."""

    pool: PoolState
    target: Target
    choice: Choice
    now: Situation
    terms: Terms
    shadows: tuple[ShadowPick, ...]
    coefficients_version: str
    cached_tokens: int
    decide_us: float

    @property
    def prefill_s(self) -> float:
        return float(self.terms.prefill_s[self.target.number])

    def missing(self, prompt: Prompt) -> U64:
        """Blocks of the prompt that the chosen target does not hold and will, shape (blocks,); none where their names are not known."""
        if prompt.chain is None or prompt.block_size is None or prompt.source == "text":
            return np.zeros(0, np.uint64)
        now, number = self.now, self.target.number
        held = int(now.gpu[number]) + int(now.cpu[number]) + int(now.disk[number])
        return prompt.chain[held // prompt.block_size :]

    def expected_s(self, ttl_s: float) -> float:
        """For how long they are expected: ttl_s beyond the predicted first token."""
        return ttl_s + self.prefill_s + float(self.terms.queue_s[self.target.number])

    def ranking(self) -> npt.NDArray[np.int64]:
        """Targets by cost, the chosen one first."""
        cost = self.terms.cost_s if self.choice.score is None else self.choice.score
        order = np.argsort(np.where(self.now.allowed, cost, np.inf), kind="stable")
        return np.concatenate([[self.target.number], order[order != self.target.number]])

    def margin_s(self) -> float | None:
        """Cost of the runner-up minus cost of the chosen, both by the cost model; None without another worker."""
        others = self.now.allowed.copy()
        others[self.target.number] = False
        if not others.any():
            return None
        return float(self.terms.cost_s[others].min() - self.terms.cost_s[self.target.number])


@dataclass(frozen=True, slots=True)
class TrustRules:
    """Seconds without a word from a worker's bridge, or behind the stream, until the index counts as degraded, and as blind."""

    stale_after_s: float
    blind_after_s: float


class Pools:
    """All pools of the fleet over one index."""

    def __init__(
        self,
        fleet: Fleet,
        tokenizers: Mapping[str, LocalTokenizer],
        policy: str,
        coefficients: Coefficients,
        key: HashKey,
        rules: TrustRules,
        rng: random.Random,
        choose_rank: bool = True,
        worker_rules: WorkerRules = WorkerRules(),  # noqa: B008 - a frozen value
        policy_rules: PolicyRules = PolicyRules(),  # noqa: B008 - a frozen value
        book: CoefficientBook | None = None,
        index_max_bytes: int = DEFAULT_LIMIT_BYTES,
        approximate: ApproximateIndex | None = None,
    ) -> None:
        self.index = PrefixIndex(index_max_bytes, sum(w.ranks for w in fleet.workers))
        self.approximate = ApproximateIndex(64 << 20, 600.0) if approximate is None else approximate
        self.index.on_new_life = self.approximate.forget_slot
        self._key_id = key.key_id
        self._other_key: set[int] = set()  # slot numbers
        self._strangers: set[WorkerId] = set()
        self._coefficients, self._rules, self._rng = coefficients, rules, rng
        self._shadow_seed = rng.getrandbits(32)  # drawn in any case, so that shadows change nothing of the live draws
        self._policy_rules = policy_rules
        self.book = CoefficientBook(coefficients.rates) if book is None else book
        self.by_name: dict[str, PoolState] = {
            p.name: PoolState(
                p, fleet.workers_of(p.name), tokenizers.get(p.name), POLICIES[policy](coefficients), self.index, key, worker_rules,
                choose_rank, policy_rules,
            )
            for p in fleet.pools
        }  # fmt: skip
        for pool in self.by_name.values():
            pool.health.went_down = functools.partial(self._guess_nothing_of, pool)
        for p in fleet.pools:
            self.set_shadows(p.name, policy_rules.shadows)
            self.by_name[p.name].seats(self.book)  # so that coefficients are shown before the first request
        self._by_model = {s.model: s for s in reversed(self.by_name.values())}

    def __iter__(self) -> Iterator[PoolState]:
        return iter(self.by_name.values())

    def knows(self, source: WorkerId) -> bool:
        """Whether the index follows this worker and rank: those that belong to a pool, and, within a bound, others that name one of our
        pools. They may be about to join (their bridge is often quicker than discovery, and an epoch's start is told once), or have been
        taken out and come back."""
        pool = self.by_name.get(source.pool)
        if pool is None:
            return False
        if source in pool.sources or source in self._strangers:
            return True
        if len(self._strangers) >= _MOST_STRANGERS:
            return False
        self._strangers.add(source)
        return True

    def hear_key(self, source: WorkerId, key_id: str | None) -> None:
        """A bridge tells which hash key it names blocks with. Another than ours: its names can never match, so the worker is blind. None:
        it does not say, and what it said before holds."""
        number = self.index.slot(source).number
        if key_id is None or (key_id != self._key_id) == (number in self._other_key):
            return
        if key_id == self._key_id:
            self._other_key.discard(number)
            log.info("the bridge of %s has this router's hash key now", source)
            return
        self._other_key.add(number)
        log.error(
            "the bridge of %s names blocks with another hash key (id %s) than this router (id %s), so no prompt can match and it is routed "
            "to by load: set the same hash_key for both",
            source, key_id, self._key_id,
        )  # fmt: skip

    def has_other_key(self, pool: PoolState, target: int) -> bool:
        """Whether this target's bridge (of a rank) has said that its hash key is not ours."""
        return any(s.number in self._other_key for s in pool.slots_of(target))

    def set_workers(self, pool: str, workers: Sequence[Worker], now_s: float) -> None:
        """See PoolState.set_workers. Raises KeyError for a pool that there is not, TooManyWorkers."""
        gone = self.by_name[pool].set_workers(workers, now_s)
        self._strangers |= {slot.source for slot in gone}
        self._strangers -= self.by_name[pool].sources.keys()

    def forget_strangers(self, now_s: float) -> None:
        """Releases what is known of workers that belong to no pool and whose bridge is silent, or are too many. Call it now and then."""
        for source in tuple(self._strangers):
            number = self.index.slot(source).number
            if now_s - self.index.heard_s[number] > self._rules.blind_after_s or len(self._strangers) > _MOST_STRANGERS:
                self._strangers.discard(source)
                self._other_key.discard(number)
                self.by_name[source.pool].newest_load.pop((source.worker, source.rank), None)
                self.index.release(source)
                self.approximate.forget_slot(number)

    def set_policy(self, pool: str, policy: str) -> None:
        """From the next decision on. Raises KeyError for a pool or policy that there is not."""
        self.by_name[pool].policy = POLICIES[policy](self._coefficients)

    def set_shadows(self, pool: str, policies: Sequence[str]) -> None:
        """From the next decision on, with counts at 0. Raises KeyError for a pool or policy that there is not, ValueError for too many."""
        made = [POLICIES[name](self._coefficients) for name in policies]
        self.by_name[pool].shadows = Shadows(made, self._shadow_seed)

    def hear_load(self, pool: PoolState, load: WorkerLoad, wall_s: float, now_s: float) -> None:
        """An engine's own load: others' requests show there. wall_s: unix seconds now; now_s: monotonic seconds now."""
        pool.newest_load[load.worker, load.rank] = load
        pool.others.note(pool.load.in_flight, now_s)  # a router that decides little would hold what has ended for its own
        for t in pool.targets:
            if t.worker == load.worker and (t.rank is None or t.rank == load.rank) and pool.present[t.number]:
                parts = [pool.newest_load.get((s.worker, s.rank)) for s in t.sources]
                read = [(p.running, p.waiting, p.time_s) for p in parts if p is not None and p.up]
                if len(read) == len(parts) and all(running is not None for running, _, _ in read):
                    age_s = max(0.0, wall_s - min(at_s for _, _, at_s in read))
                    running, waiting = sum(r or 0.0 for r, _, _ in read), sum(w or 0.0 for _, w, _ in read)
                    pool.others.hear(t.number, running, waiting, now_s - age_s)

    def learn(self, decided: Decided, usage: Usage, ttft_s: float | None) -> None:
        """A request was answered with 200 where it was dispatched to: its prefill seconds are an observation for the fits."""
        now, target = decided.now, decided.target
        nobody_waited = bool(now.in_flight[target.number] == now.decoding[target.number])
        seconds = prefill_seconds(ttft_s, usage.engine_ttft_s, usage.engine_queue_s, nobody_waited)
        self.book.entry(decided.pool.name, target.hardware).window.observe(usage.prompt_tokens, usage.cached_tokens, seconds)

    def for_model(self, model: str | None) -> tuple[PoolState, str | None] | None:
        """The pool that serves a model name, and the LoRA adapter that the name means there, or None.

        Rule: a pool's own model name is its base model; then what its workers say that they serve, bases and adapters; in a fleet of one
        pool any other name is taken for an adapter of it (the engine answers 404 when it is none); no name at all means the first pool.
        """
        if model is None:
            return next(iter(self.by_name.values())), None
        if model in self._by_model:
            return self._by_model[model], None
        for pool in self.by_name.values():
            if pool.served is not None and model in pool.served.names:
                return pool, None
            if pool.served is not None and model in pool.served.adapters:
                return pool, model
        if len(self.by_name) == 1:
            return next(iter(self.by_name.values())), model
        return None

    def trust(self, pool: PoolState, now_s: float) -> npt.NDArray[np.uint8]:
        """Trust codes by target: what the events say, and no more than the bridge's silence and key and the index's lag allow."""
        trust = self.index.trust
        if self._other_key:
            trust = trust.copy()
            trust[list(self._other_key)] = BLIND
        return trust_by_target(
            pool.seats(self.book).slots, trust, self.index.heard_s, float(self.index.level_s),
            now_s - self._rules.stale_after_s, now_s - self._rules.blind_after_s,
        )  # fmt: skip

    def decide(self, pool: PoolState, prompt: Prompt, excluded: set[int], now_s: float, session: str | None = None) -> Decided | None:
        """Chooses among the targets that `PoolState.allowed` and the rules of policy/eligible.py leave. None: nobody."""
        started = time.perf_counter()
        now = self._situation(pool, prompt, excluded, now_s, session)
        seats = pool.seats(self.book)
        costs = terms(now, self._coefficients, seats.rates)
        choice = pool.policy.choose(now, costs, self._rng)
        if choice is None:
            return None
        shadows = pool.shadows.picks(now, costs, choice.worker)
        return Decided(
            pool, pool.targets[choice.worker], choice, now, costs, shadows, seats.versions[choice.worker],
            min(int(now.expected[choice.worker]), most_cached_tokens(now.prompt_tokens, now.block_size)),
            (time.perf_counter() - started) * 1e6,
        )  # fmt: skip

    def _situation(self, pool: PoolState, prompt: Prompt, excluded: set[int], now_s: float, session: str | None) -> Situation:
        seats, load = pool.seats(self.book), pool.load
        n = len(seats.targets)
        tokens = prompt.tokens if prompt.tokens is not None else prompt.guessed_tokens
        block_size = prompt.block_size or 1
        trust = self.trust(pool, now_s)
        if prompt.chain is None or not prompt.reads_cache:
            held = np.zeros((4, n), np.int64)
        else:
            if prompt.source == "text":
                found = self._sent_before(prompt.chain, now_s)
                trust = np.full(n, DEGRADED, np.uint8)
            else:
                found = self.index.match(prompt.chain, now_s, prompt.others)
            held = tokens_by_target(seats.slots, _tiers(found), found.expected, block_size)
            if prompt.source != "text" and pool.tells_nothing():
                found = self._sent_before(prompt.chain, now_s)
                np.maximum(held[3], tokens_by_target(seats.slots, _tiers(found), found.expected, block_size)[3], out=held[3])
        pool.others.note(load.in_flight, now_s)
        queue_s, decoding, in_flight = load.queue_s(now_s), load.decoding.copy(), load.in_flight.copy()
        others = pool.others.load(n, now_s)
        if others is not None:
            queue_s += others[0]
            decoding += np.rint(others[1]).astype(np.int64)
            in_flight += np.rint(others[2]).astype(np.int64)
        cold_left = pool.cold.left(n, pool.new_targets(now_s), now_s)
        gpu, cpu, disk, expected = held
        allowed = eligible(
            pool.allowed(excluded, now_s),
            tokens,
            gpu,
            cpu,
            disk,
            expected,
            trust,
            pool.draining,
            cold_left,
            self._policy_rules.drain_min_hit,
        )
        return Situation(
            tokens, block_size, gpu, cpu, disk, expected, trust, queue_s, decoding, in_flight, allowed, pool.draining.copy(), cold_left,
            seats.keys, None if session is None else _name_key(session),
            int(prompt.chain[0]) if prompt.chain is not None and len(prompt.chain) else None,
        )  # fmt: skip

    def _sent_before(self, chain: U64, now_s: float) -> Overlaps:
        """What was sent to each worker, and perhaps is there still."""
        self.approximate.fit(len(self.index.trust))
        return self.approximate.match(chain, now_s)

    def _guess_nothing_of(self, pool: PoolState, targets: list[int]) -> None:
        for number in targets:
            for slot in pool.slots_of(number):
                self.approximate.forget_slot(slot.number)

    def expect(self, decided: Decided, prompt: Prompt, ttl_s: float, now_s: float) -> list[int]:
        """The request is dispatched: books what cold caps and others' load need, and enters the prompt's unconfirmed blocks as expected on
        the chosen target; what no engine will tell of is remembered. Call it before the flight is admitted. Returns the tickets to drop
        when it comes to nothing."""
        pool, number = decided.pool, decided.target.number
        pool.cold.take(number, decided.now.prompt_tokens - decided.cached_tokens, now_s)
        pool.others.sent(number, int(pool.load.in_flight[number]) + 1, decided.prefill_s, now_s)
        if prompt.chain is not None and (prompt.source == "text" or pool.tells_nothing()):
            for slot in pool.slots_of(number):
                self.approximate.learn(slot.number, prompt.chain, now_s)
        missing = decided.missing(prompt)
        if not len(missing):
            return []
        expires_s = now_s + decided.expected_s(ttl_s)
        return [self.index.expect(s.number, missing, expires_s) for s in decided.pool.slots_of(decided.target.number)]


def _tiers(found: Overlaps) -> tuple[npt.NDArray[np.int32], ...]:
    """Blocks on GPU, CPU and disk, by slot."""
    return found.gpu, found.cpu, found.disk


def _name_key(name: str) -> int:
    """A name as a number that all routers agree on."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
