"""What the router's decision alone costs: names of a prompt's blocks, who holds how many of them, what it would cost where, the choice.

    python -m bench.bench_decision [--quick]

Prompts of 8k, 32k and 128k tokens in blocks of 16; pools of 8, 64 and 512 workers; 4 million blocks held, in all. Each prompt's first
quarter (system prompt, tools) is held by every worker, its first half by one worker in ten, all but its last message by one worker. Before
each decision the index takes a KV batch (64 blocks stored, 64 removed), so that it does not rest in the processor's caches. Everything runs
on one core, in this process, through the router's own objects; HTTP, JSON, tokenizing and records are bench_router's.

    names        the chain of the whole prompt, anew            names, known   only of its last message: the conversation is known
    match        blocks held and expected, of all workers       decide         match, load, trust, cost of all workers, choice
    whole        names and decide                               whole, known   names, known and decide: what an agent's next call costs
    choose       a policy's choice alone, the terms given       with 3 shadows   decide with three more policies looking on

A table goes to stderr; the last line of stdout is one JSON object, also kept as bench/results/decision.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.machine import describe_machine, write_result
from bench.servers import say
from router.policy.cost import Coefficients
from router.policy.policies import POLICIES, Policy
from router.pools import Pools, PoolState, TrustRules
from router.prompts.prompt import Prompt
from schemas.block_hash import U64, HashKey
from schemas.fleet import Fleet
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId

BLOCK_TOKENS = 16
TOKENS = (8_192, 32_768, 131_072)
WORKERS = (8, 64, 512)
HELD_BLOCKS = 4_000_000
PROMPTS = 16  # of each length, taken in turn
NEW_BLOCKS = 16  # a prompt's last message, which nobody holds
CHURN_BLOCKS = 64
SHADOWS = ("cache_aware", "least_loaded", "round_robin")
NOW_S = 1000.0
TARGET_US = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer decisions; keeps no result")
    args = parser.parse_args()
    machine = describe_machine()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result: dict[str, Any] = {
        "benchmark": "decision",
        "machine": machine,
        "block_tokens": BLOCK_TOKENS,
        "held_blocks": HELD_BLOCKS,
        "us": {},
        "choose_us": {},
        "index": {},
    }
    for workers in WORKERS:
        say(f"{workers} workers: filling the index ...")
        bench = Bench(workers)
        result["index"][f"{workers}_workers"] = bench.filled
        for tokens in TOKENS:
            cell = f"{tokens // 1024}k_tokens_{workers}_workers"
            result["us"][cell] = bench.stages(tokens, (100 if args.quick else 1000) // (4 if tokens > 100_000 else 1))
            if tokens == 32_768:
                result["choose_us"][f"{workers}_workers"] = bench.policies(tokens, 100 if args.quick else 500)
            say(f"  {cell:28} " + "  ".join(f"{k} {v['p50']:.0f}/{v['p99']:.0f}" for k, v in result["us"][cell].items()))
        say(
            "  choose, 32k tokens             "
            + "  ".join(f"{k} {v['p50']:.0f}" for k, v in result["choose_us"][f"{workers}_workers"].items())
        )
    met = result["us"]["32k_tokens_64_workers"]
    result["target"] = {
        "32k_tokens_64_workers_p50_us": TARGET_US,
        "known_prefix_p50_us": met["whole_known"]["p50"],
        "all_named_anew_p50_us": met["whole"]["p50"],
    }
    say("p50/p99 in us. " + json.dumps(result["target"]))
    if not args.quick:
        write_result("decision", result)
    print(json.dumps(result))


class Bench:
    """A pool of so many workers whose index is full."""

    def __init__(self, workers: int) -> None:
        entries = [{"pool": "p", "name": f"w{n}", "url": f"http://127.0.0.1:{n + 1}"} for n in range(workers)]
        fleet = Fleet.model_validate({"pools": [{"name": "p"}], "workers": entries})
        self._pools = Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10, 60), random.Random(1))
        (self._pool,) = self._pools
        self._pool.learn_block_size(BLOCK_TOKENS)
        self._sources = [WorkerId("p", f"w{n}", 0) for n in range(workers)]
        self._seq = [0] * workers
        self._rng = np.random.default_rng(workers)
        self._churned: list[tuple[int, U64]] = []
        self._prompts = {tokens: [self._prompt(tokens, number) for number in range(PROMPTS)] for tokens in TOKENS}
        for n in range(workers):
            self._apply(n, [(Kind.EPOCH_STARTED, np.zeros(0, np.uint64))])
        began = time.perf_counter()
        held = self._fill()
        self.filled = {
            "held_blocks": held,
            "fill_s": round(time.perf_counter() - began, 2),
            "distinct_blocks": self._pools.index.rows,
            "size_mb": round(self._pools.index.size_bytes / 1e6, 1),
        }
        for n in range(workers):
            for _ in range(2):
                self._pool.load.admit(n, float(self._rng.uniform(0.01, 0.5)), True, NOW_S - 0.01)

    def _prompt(self, tokens: int, number: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Token ids. Prompts of four agents: those of one begin with the same quarter."""
        agent = np.random.default_rng([tokens, number % 4])
        own = np.random.default_rng([tokens, 100 + number])
        return np.concatenate([agent.integers(0, 150_000, tokens // 4), own.integers(0, 150_000, tokens - tokens // 4)]).astype(np.uint32)

    def _fill(self) -> int:
        """Prompts as the module says, then conversations that nobody asks for again, until `HELD_BLOCKS`. Returns how many are held."""
        n_workers = len(self._sources)
        held = 0
        for prompts in self._prompts.values():
            for number, ids in enumerate(prompts):
                chain = _chain(self._pool, ids)
                home = int(self._rng.integers(n_workers))
                known = len(chain) - NEW_BLOCKS
                for n in range(n_workers):
                    if n == home:
                        part = chain[:known] if number < 4 else chain[len(chain) // 4 : known]
                    elif number < 4:
                        part = chain[: len(chain) // (2 if self._rng.random() < 0.1 else 4)]
                    else:
                        part = chain[len(chain) // 4 : len(chain) // 2] if self._rng.random() < 0.1 else chain[:0]
                    if len(part):
                        self._apply(n, [(Kind.STORED, part)])
                        held += len(part)
        each = max(0, HELD_BLOCKS - held) // n_workers
        for n in range(n_workers):
            for at in range(0, each, 1024):
                self._apply(n, [(Kind.STORED, self._some_blocks(min(1024, each - at)))])
        return held + each * n_workers

    def _some_blocks(self, count: int) -> U64:
        return self._rng.integers(1, 1 << 63, count).astype(np.uint64)

    def _apply(self, n: int, events: list[tuple[Kind, U64]]) -> None:
        rows = np.zeros(len(events), EVENT)
        for row, (kind, hashes) in zip(rows, events, strict=True):
            row["kind"], row["count"], row["seq"], row["block_size"] = kind, len(hashes), self._seq[n], BLOCK_TOKENS
            row["flags"] = COMPLETE if kind == Kind.EPOCH_STARTED else 0
        hashes = np.concatenate([h for _, h in events])
        batch = KvBatch(self._sources[n], 1, self._seq[n], self._seq[n], NOW_S, NOW_S, rows, hashes)
        self._seq[n] += 1
        self._pools.index.apply(batch, NOW_S)

    def _churn(self) -> None:
        n, new = int(self._rng.integers(len(self._sources))), self._some_blocks(CHURN_BLOCKS)
        if len(self._churned) > 1000:
            old_n, old = self._churned.pop(0)
            self._apply(old_n, [(Kind.REMOVED, old)])
        self._churned.append((n, new))
        self._apply(n, [(Kind.STORED, new)])

    def stages(self, tokens: int, times: int) -> dict[str, dict[str, float]]:
        """p50 and p99 of each stage."""
        pools, pool = self._pools, self._pool
        chains = [_chain(pool, ids) for ids in self._prompts[tokens]]
        prompts = [Prompt("exact", tokens, tokens, chain, BLOCK_TOKENS) for chain in chains]

        def decide(k: int) -> None:
            if pools.decide(pool, prompts[k], set(), NOW_S) is None:
                raise SystemExit("the router found nobody to send a request to")

        def whole(k: int, known: U64 | None) -> None:
            chain = pool.chain(self._prompts[tokens][k], None, None, known)
            pools.decide(pool, Prompt("exact", tokens, tokens, chain, BLOCK_TOKENS), set(), NOW_S)

        runs: dict[str, Callable[[int], object]] = {
            "names": lambda k: pool.chain(self._prompts[tokens][k], None, None),
            "names_known": lambda k: pool.chain(self._prompts[tokens][k], None, None, chains[k][:-NEW_BLOCKS]),
            "match": lambda k: pools.index.match(chains[k], NOW_S),
            "decide": decide,
            "whole": lambda k: whole(k, None),
            "whole_known": lambda k: whole(k, chains[k][:-NEW_BLOCKS]),
        }
        self._check(prompts)
        found = self._time(runs, times)
        pools.set_shadows(pool.name, SHADOWS)
        found |= self._time({"decide_with_3_shadows": decide}, times)
        pools.set_shadows(pool.name, ())
        return found

    def policies(self, tokens: int, times: int) -> dict[str, dict[str, float]]:
        """Of each policy's choice among workers whose terms are known."""
        chain = _chain(self._pool, self._prompts[tokens][0])
        decided = self._pools.decide(self._pool, Prompt("exact", tokens, tokens, chain, BLOCK_TOKENS), set(), NOW_S)
        assert decided is not None
        rng = random.Random(1)

        def chooses(policy: Policy) -> Callable[[int], object]:
            return lambda _: policy.choose(decided.now, decided.terms, rng)

        return self._time({name: chooses(make(Coefficients())) for name, make in POLICIES.items()}, times)

    def _check(self, prompts: list[Prompt]) -> None:
        """The index says what was put into it: else the figures are of something else."""
        for prompt in prompts:
            decided = self._pools.decide(self._pool, prompt, set(), NOW_S)
            assert decided is not None and prompt.chain is not None
            held = np.sort(np.asarray(decided.now.held)) // BLOCK_TOKENS
            if held[-1] != len(prompt.chain) - NEW_BLOCKS or held[0] != len(prompt.chain) // 4:
                raise SystemExit(f"of {len(prompt.chain)} blocks the workers hold {held[-1]} at most and {held[0]} at least")

    def _time(self, runs: dict[str, Callable[[int], object]], times: int) -> dict[str, dict[str, float]]:
        spent: dict[str, list[int]] = {name: [] for name in runs}
        for i in range(times + 5):
            for j, (name, run) in enumerate(runs.items()):
                self._churn()
                prompt = (i * len(runs) + j * 5) % PROMPTS  # never the last one's, whose blocks would still lie in the caches
                began = time.perf_counter_ns()
                run(prompt)
                spent[name].append(time.perf_counter_ns() - began)
        return {
            name: {"p50": round(float(np.percentile(ns[5:], 50)) / 1000, 1), "p99": round(float(np.percentile(ns[5:], 99)) / 1000, 1)}
            for name, ns in spent.items()
        }


def _chain(pool: PoolState, ids: np.ndarray[Any, np.dtype[np.uint32]]) -> U64:
    chain = pool.chain(ids, None, None)
    assert chain is not None
    return chain


if __name__ == "__main__":
    main()
