"""What the router tells Prometheus. Labels are bounded: pools and workers of the fleet file, classes of status, never what a client sent.

Numbers that a request touches are plain ones (counted.py); those that something else already keeps (index, feed, recorder, load) are read
at scrape time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.access.gate import Gate
from router.access.refusal import REASONS
from router.counted import Counted, Measured
from router.index.feed import Feed, FeedSink
from router.index.prefix_index import EXACT
from router.pools import Decided, Pools
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.records.recorder import Recorder
from router.replicas.link import Link
from router.workers.breaker import STATES
from router.workers.membership import Membership
from router.workers.watch import Watch

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECIDE_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 25e-3)
_TOKENIZE_S = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 2)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._requests = Counted(
            r, "warmwatch_router_requests", "Requests by the worker that answered and the class of the status", ["pool", "worker", "status"]
        )
        self._failed = Counted(
            r, "warmwatch_router_attempts_failed", "Dispatches that failed before the first byte", ["pool", "worker"]
        )  # fmt: skip
        self._broken = Counted(
            r,
            "warmwatch_router_broken_answers",
            "Answers that a worker broke off (upstream) or left off (timeout) within; such a request counts by its status all the same",
            ["pool", "worker", "reason"],
        )
        self._rejected = Counted(
            r,
            "warmwatch_router_rejected",
            "Requests that the router refused itself: by their form as HTTP (http), their body, their model's name, or a reason of "
            "warmwatch_router_refused. Those over a key's tokens are in warmwatch_router_requests too; all others have no pool",
            ["status", "reason"],
        )
        self._ttft = Measured(
            r, "warmwatch_router_ttft_seconds", "Dispatch to first content byte of streams", _SECONDS, ["pool", "worker"]
        )  # fmt: skip
        self._decide = Measured(r, "warmwatch_router_decide_seconds", "Time of a decision without tokenizing", _DECIDE_S)
        self._tokenize = Measured(r, "warmwatch_router_tokenize_seconds", "Time until a prompt's block names are known", _TOKENIZE_S)
        self._prompts = Counted(
            r, "warmwatch_router_prompts", "Prompts by where their token ids came from", ["pool", "token_source"]
        )  # fmt: skip
        self._skipped = Counted(
            r,
            "warmwatch_router_prompts_skipped",
            "Prompts not tokenized for a bound's sake: too_long (max_prompt_chars), queue_full (max_waiting_prompts)",
            ["pool", "reason"],
        )
        self._predicted = Counted(
            r, "warmwatch_router_predicted_cached_tokens", "Forecast of cached prompt tokens, beside a report", ["pool"]
        )  # fmt: skip
        self._reported = Counted(
            r, "warmwatch_router_reported_cached_tokens", "Cached prompt tokens as engines reported them", ["pool"]
        )  # fmt: skip
        self._prompt_tokens = Counted(r, "warmwatch_router_prompt_tokens", "Prompt tokens as engines reported them", ["pool"])
        self.crashes = Counter("warmwatch_router_internal_errors", "Requests that met an error of the router's own", registry=r)

    def prompt_read(self, pool: str, prompt: Prompt) -> None:
        if prompt.tokenize_us is not None:
            self._tokenize.observe(prompt.tokenize_us / 1e6)
        self._prompts.by[pool, prompt.source] += 1
        if prompt.skipped is not None:
            self._skipped.by[pool, prompt.skipped] += 1

    def decided(self, decided: Decided) -> None:
        """Once an attempt."""
        self._decide.observe(decided.decide_us / 1e6)

    def attempt_failed(self, pool: str, worker: str) -> None:
        self._failed.by[pool, worker] += 1

    def broke_off(self, pool: str, worker: str, reason: str) -> None:
        self._broken.by[pool, worker, reason] += 1

    def rejected(self, status: int, reason: str) -> None:
        """reason: one of a small set, never what a client sent."""
        self._rejected.by[str(status), reason] += 1

    def first_token(self, pool: str, worker: str, ttft_s: float) -> None:
        self._ttft.observe(ttft_s, (pool, worker))

    def ended(self, pool: str, worker: str | None, status: int | None) -> None:
        self._requests.by[pool, worker or "none", f"{status // 100}xx" if status else "left"] += 1

    def reported(self, pool: str, prompt_tokens: int | None, cached_tokens: int | None, predicted_tokens: int | None) -> None:
        """predicted_tokens counts only beside a report, so that the two can be held against each other."""
        if prompt_tokens is not None:
            self._prompt_tokens.by[pool,] += prompt_tokens
        if cached_tokens is not None:
            self._reported.by[pool,] += cached_tokens
            if predicted_tokens is not None:
                self._predicted.by[pool,] += predicted_tokens

    def page(self) -> bytes:
        return generate_latest(self.registry)


class StateCollector(Collector):
    """Reads what index, load, feed and recorder keep, at scrape time, on the loop that owns them."""

    def __init__(self, pools: Pools, feed: Feed, sink: FeedSink, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._pools, self._feed, self._sink, self._recorder = pools, feed, sink, recorder
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        yield from self._workers()
        yield from self._index()

    def _workers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("warmwatch_router_worker_up", "1: answers", labels=["pool", "worker", "rank"])
        flight = GaugeMetricFamily("warmwatch_router_in_flight", "This router's requests on their way", labels=["pool", "worker", "rank"])
        elsewhere = GaugeMetricFamily(
            "warmwatch_router_replicas_in_flight",
            "Requests on their way from this router's replicas, as they tell",
            labels=["pool", "worker", "rank"],
        )
        trust = GaugeMetricFamily(
            "warmwatch_router_worker_trust",
            "Trust in the worker's index: 1 exact, 0.5 degraded, 0 blind",
            labels=["pool", "worker", "rank"],
        )
        other_key = GaugeMetricFamily(
            "warmwatch_router_worker_other_key",
            "1: the worker's bridge has another hash key than the router, so its blocks match no prompt",
            labels=["pool", "worker", "rank"],
        )
        held = GaugeMetricFamily("warmwatch_router_held_blocks", "Distinct blocks on the worker's GPU", labels=["pool", "worker", "rank"])
        for pool in self._pools:
            codes = self._pools.trust(pool, self._clock())
            for t in pool.here():
                labels = [pool.name, t.worker, "any" if t.rank is None else str(t.rank)]
                up.add_metric(labels, float(pool.health.up[t.number]))
                flight.add_metric(labels, float(pool.load.own()[t.number]))
                elsewhere.add_metric(labels, float(pool.load.of_replicas[t.number]))
                trust.add_metric(labels, float(codes[t.number]) / EXACT)
                other_key.add_metric(labels, float(self._pools.has_other_key(pool, t.number)))
                held.add_metric(labels, float(sum(self._pools.index.held_blocks(s.number) for s in pool.slots_of(t.number))))
        conflicts = CounterMetricFamily(
            "warmwatch_router_block_size_conflicts",
            "KV batches whose block size is not the pool's: their blocks match no prompt",
            labels=["pool"],
        )
        for pool in self._pools:
            conflicts.add_metric([pool.name], float(pool.block_size_conflicts))
        yield from (up, flight, elsewhere, trust, other_key, held, conflicts)

    def _index(self) -> Iterator[Metric]:
        index = self._pools.index
        index.expire(self._clock())
        lag_s = index.lag_s(self._clock())
        gauges = {
            "index_blocks": ("Distinct blocks known", index.rows),
            "index_bytes": ("Memory of the index", index.size_bytes),
            "index_expected_blocks": ("Blocks expected from dispatched requests", index.pending_blocks),
            "approximate_blocks": ("Blocks and pieces of text that were sent somewhere and are remembered", len(self._pools.approximate)),
            "approximate_bytes": ("Memory of the approximate index", self._pools.approximate.size_bytes),
            "index_limit_bytes": ("What the index may take (index_max_bytes)", index.limit_bytes),
            "index_sets": ("Distinct sets of workers that hold a block, needed at once at most", index.sets),
            "index_unmatched_workers": (
                "Workers that match nothing, since they have more attention groups than are followed",
                index.unmatched_slots,
            ),
            "index_lag_seconds": (
                "How far the index is behind the stream; NaN: nothing was read yet",
                math.nan if lag_s is None else lag_s,
            ),
            "feed_level_age_seconds": ("Since the index was last level with the stream", self._clock() - index.level_s),
            "feed_following": ("1: the index follows the stream", float(self._feed.trouble is None)),
            "feed_caught_up": ("1: the index has applied what the log held at the start", float(self._feed.caught_up)),
            "records_waiting": ("Decisions and outcomes that the stream does not have yet", self._recorder.waiting),
        }
        counters = {
            "index_batches": ("KV batches applied", index.counts.batches),
            "index_events_blocks": ("Blocks named by applied batches", index.counts.blocks),
            "index_stale_batches": ("KV batches that came too late", index.counts.stale_batches),
            "index_repeated_batches": ("KV batches that came twice, a producer's retry", index.counts.repeated_batches),
            "index_refused_blocks": ("Blocks that are not known because the memory of the index is used up", index.refused_blocks),
            "index_snapshots": ("Snapshots that replaced what was known of a worker", index.counts.snapshots),
            "index_mismatches": ("Complete snapshots that did not tell what was thought to be exact", index.counts.mismatches),
            "index_crowded_out": ("Dispatches whose expected blocks were dropped for want of room", index.counts.crowded_out),
            "index_gaps": ("Gap marks", index.counts.gaps),
            "index_unexplained_gaps": ("Jumps of a worker's sequence without a gap mark", index.counts.unexplained_gaps),
            "index_unknown_removals": ("Removals of blocks that were not held", index.unknown_removals),
            "feed_records": ("Records read from the stream", self._feed.records),
            "feed_bad_records": ("Records that could not be read", self._feed.bad_records),
            "feed_strangers": ("Records of pools that are not ours, or of too many workers that belong to none", self._sink.strangers),
            "feed_stumbles": ("KV batches that could not be applied, an error of the router's own", self._sink.stumbles),
            "feed_restarts": ("Times that the index was built anew", self._feed.restarts),
            "records": ("Decisions and outcomes handed to the stream", self._recorder.recorded),
            "records_dropped": ("Decisions and outcomes dropped", self._recorder.dropped),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"warmwatch_router_{name}", text, value=float(value))
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"warmwatch_router_{name}", text, value=float(value))


class WorkersCollector(Collector):
    """Who belongs to the pools and in what state they are; retries, and requests that wait for a place."""

    def __init__(self, pools: Pools, membership: Membership, watch: Watch, clock: Callable[[], float]) -> None:
        self._pools, self._membership, self._watch, self._clock = pools, membership, watch, clock

    def collect(self) -> Iterable[Metric]:
        now_s = self._clock()
        states = GaugeMetricFamily(
            "warmwatch_router_workers",
            f"Workers (or ranks) by state: {', '.join(STATES)}; draining ones count as that",
            labels=["pool", "state"],
        )
        changes = CounterMetricFamily(
            "warmwatch_router_worker_changes", "Times that a worker came into a state", labels=["pool", "worker", "state"]
        )
        retries = CounterMetricFamily(
            "warmwatch_router_retries", "Further workers asked (taken), or not for want of budget (refused)", labels=["pool", "budget"]
        )
        waiting = GaugeMetricFamily("warmwatch_router_queue", "Requests that wait for a place at a worker", labels=["pool"])
        waited = CounterMetricFamily("warmwatch_router_queue_waited", "Requests that waited for a place and got it", labels=["pool"])
        waited_s = CounterMetricFamily("warmwatch_router_queue_waited_seconds", "How long those waited in all", labels=["pool"])
        full = CounterMetricFamily(
            "warmwatch_router_queue_refused", "Requests told 429: too many wait (full), or waited too long", labels=["pool", "reason"]
        )
        for pool in self._pools:
            pool.health.up_at(now_s)
            counts = dict.fromkeys((*STATES, "draining"), 0)
            for t in pool.here():
                counts["draining" if pool.draining[t.number] else pool.health.state(t.number, now_s)] += 1
            for state, count in counts.items():
                states.add_metric([pool.name, state], float(count))
            for (worker, state), count in pool.health.changes.items():
                changes.add_metric([pool.name, worker, state], float(count))
            for budget, count in (("taken", pool.retries.taken), ("refused", pool.retries.refused)):
                retries.add_metric([pool.name, budget], float(count))
            queue = pool.admission
            waiting.add_metric([pool.name], float(queue.waiting))
            waited.add_metric([pool.name], float(queue.waited))
            waited_s.add_metric([pool.name], queue.waited_s)
            for reason, count in (("full", queue.refused_full), ("waited", queue.refused_waited)):
                full.add_metric([pool.name, reason], float(count))
        yield from (states, changes, retries, waiting, waited, waited_s, full)
        trouble = GaugeMetricFamily(
            "warmwatch_router_membership_trouble", "1: a source of workers was not understood, and its last word holds", labels=["source"]
        )
        for source in self._watch.sources:
            trouble.add_metric([source], float(source in self._watch.trouble))
        yield trouble
        yield CounterMetricFamily(
            "warmwatch_router_membership_failures", "Times that a source of workers was not understood", value=float(self._watch.failures)
        )
        yield CounterMetricFamily(
            "warmwatch_router_workers_joined", "Workers that joined since the start", value=float(self._membership.joined)
        )
        yield CounterMetricFamily("warmwatch_router_workers_left", "Workers that left since the start", value=float(self._membership.left))


class PolicyCollector(Collector):
    """Shadow policies beside the live one, prefill coefficients, what others send, and who is capped or drains."""

    def __init__(self, pools: Pools, clock: Callable[[], float]) -> None:
        self._pools, self._clock = pools, clock

    def collect(self) -> Iterable[Metric]:
        yield from self._shadows()
        yield from self._coefficients()
        others = GaugeMetricFamily(
            "warmwatch_router_others_requests",
            "Requests of others on the worker, told from the engine's own load; absent: not known",
            labels=["pool", "worker", "rank"],
        )
        new = GaugeMetricFamily("warmwatch_router_new_workers", "Workers whose cold tokens are capped since they are new", labels=["pool"])
        now_s = self._clock()
        for pool in self._pools:
            new.add_metric([pool.name], float(len(pool.new_targets(now_s))))
            for target in pool.here():
                requests = pool.others.of(target.number, now_s)
                if requests is not None:
                    others.add_metric([pool.name, target.worker, "any" if target.rank is None else str(target.rank)], requests)
        yield from (others, new)

    def _shadows(self) -> Iterator[Metric]:
        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"warmwatch_router_shadow_{name}", text, labels=["pool", "policy"])

        families = {
            "decisions": counter("decisions", "Decisions that the shadow policy looked at"),
            "agreed": counter("agreed", "Of these, the same worker was chosen"),
            "errors": counter("errors", "Decisions at which it failed"),
            "seconds": counter("seconds", "Time that it took"),
            "cached_tokens": counter("cached_tokens", "Forecast of cached prompt tokens where it would have sent them"),
            "chosen_cached_tokens": counter("chosen_cached_tokens", "The same where those requests went"),
        }
        for pool in self._pools:
            for shadow in pool.shadows:
                for name, family in families.items():
                    family.add_metric([pool.name, shadow.policy.name], float(getattr(shadow, name)))
        yield from families.values()

    def _coefficients(self) -> Iterator[Metric]:
        labels = ["pool", "hardware"]
        value = GaugeMetricFamily(
            "warmwatch_router_prefill_coefficient",
            "Prefill seconds = base + a * uncached + b * uncached * (cached + uncached / 2); of: in_use, or the newest fit",
            labels=[*labels, "coefficient", "of"],
        )
        error = GaugeMetricFamily(
            "warmwatch_router_prefill_fit_error",
            "Relative error of the newest fit on outcomes that it had not seen",
            labels=[*labels, "quantile"],
        )
        adopted = GaugeMetricFamily("warmwatch_router_prefill_fit_in_use", "1: a fit is in use, 0: what is configured", labels=labels)
        seen = CounterMetricFamily(
            "warmwatch_router_prefill_outcomes", "Outcomes by whether they tell prefill seconds (used), or why not", labels=[*labels, "use"]
        )
        for entry in self._pools.book:
            of = [entry.pool, entry.hardware or "none"]
            used, newest = self._pools.book.in_use(entry.pool, entry.hardware), entry.versions[-1]
            adopted.add_metric(of, float(used.fit is not None))
            for which, version in (("in_use", used), *([("fit", newest)] if newest.fit is not None else [])):
                for name, number in (("base", version.rates.base_s), ("a", version.rates.a), ("b", version.rates.b)):
                    value.add_metric([*of, name, which], number)
            if newest.fit is not None:
                for quantile, number in (("0.5", newest.fit.error_p50), ("0.9", newest.fit.error_p90)):
                    error.add_metric([*of, quantile], number)
            for use, count in {"used": entry.window.seen, **entry.window.useless}.items():
                seen.add_metric([*of, use], float(count))
        yield from (value, error, adopted, seen)
        failures = float(self._pools.book.write_failures)
        yield CounterMetricFamily("warmwatch_router_fits_file_failures", "Times that the fits file could not be written", value=failures)


class AccessCollector(Collector):
    """Who comes in, by the names of the keys file, and who does not."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        gate = self._gate
        refused = CounterMetricFamily("warmwatch_router_refused", "Requests that were not let in", labels=["reason"])
        for reason in REASONS:
            refused.add_metric([reason], float(gate.refusals[reason]))
        yield refused
        if gate.is_open:
            return
        requests = CounterMetricFamily("warmwatch_router_key_requests", "Requests let in, by key", labels=["key"])
        tokens = CounterMetricFamily("warmwatch_router_key_prompt_tokens", "Prompt tokens counted, by key", labels=["key"])
        inside = GaugeMetricFamily("warmwatch_router_key_in_flight", "Requests inside, by key", labels=["key"])
        for family, counted in ((requests, gate.requests), (tokens, gate.tokens), (inside, gate.in_flight)):
            for name, value in counted.items():
                family.add_metric([name], float(value))
        yield from (requests, tokens, inside)
        yield GaugeMetricFamily(
            "warmwatch_router_keys_broken", "1: the keys file is not to be used, and older keys hold", value=float(gate.trouble is not None)
        )


class PromptsCollector(Collector):
    """What is kept of prompts that were read, so that they are not read again."""

    def __init__(self, reader: PromptReader, pools: Pools) -> None:
        self._reader, self._pools = reader, pools

    def collect(self) -> Iterable[Metric]:
        read = CounterMetricFamily(
            "warmwatch_router_chats_read",
            "Chats read by the pool's tokenizer: as the rest of a known one, or whole",
            labels=["pool", "known"],
        )
        chats = GaugeMetricFamily("warmwatch_router_known_chats_bytes", "Memory of known chats (known_chats_mb)", labels=["pool"])
        pieces = GaugeMetricFamily("warmwatch_router_known_pieces_bytes", "Memory of pieces of text with their token ids", labels=["pool"])
        for pool in self._pools:
            known = self._reader.known_chats.get(pool.name)
            if known is not None:
                for word, count in (("yes", known.hits), ("no", known.misses)):
                    read.add_metric([pool.name, word], float(count))
                chats.add_metric([pool.name], float(known.kept_bytes))
            if pool.tokenizer is not None and pool.tokenizer.segments is not None:
                pieces.add_metric([pool.name], float(pool.tokenizer.segments.kept_bytes))
        yield from (read, chats, pieces)
        yield GaugeMetricFamily(
            "warmwatch_router_tokenize_answers_bytes", "Memory of engines' answers to /tokenize", value=float(self._reader.answers_bytes)
        )
        yield CounterMetricFamily(
            "warmwatch_router_tokenize_failures", "Times that an engine gave no token ids", value=float(self._reader.failures)
        )


class ReplicasCollector(Collector):
    """What this router and its replicas tell each other."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def collect(self) -> Iterable[Metric]:
        link, heard, counts = self._link, self._link.heard, self._link.heard.counts
        gauges = {
            "connected": ("Addresses connected to, perhaps our own among them", len(link.connected)),
            "heard": ("Replicas that speak", len(heard.names)),
            "silent": ("Addresses from which nobody speaks", link.silent),
            "flights": ("Requests of other replicas that count as load here", heard.flights),
        }
        counters = {
            "messages_sent": ("Messages to the other replicas", link.sent),
            "messages_heard": ("Messages of other replicas", counts.messages),
            "bad_messages": ("What came on the port and is no message of a replica", link.bad_messages),
            "gaps": ("Messages of other replicas that did not come", counts.gaps),
            "messages_again": ("Messages of other replicas that came again, by another address", counts.again),
            "given_up": ("Replicas that were silent for too long", counts.silent),
            "healed": ("Requests of other replicas booked or ended by their full state alone", counts.healed),
            "unknown_targets": ("Requests of other replicas to workers that are not here", counts.unknown_targets),
            "unknown_flights": ("Words about requests of other replicas that were never announced", counts.unknown_flights),
            "other_key": ("Requests of replicas whose blocks have another hash key", counts.other_key),
            "refused": ("What other replicas told over a bound", counts.refused),
            "dropped": ("Events that did not fit in a message", link.outbox.dropped),
            "errors": ("Messages not sent, or not booked, by an error of the router's own", link.errors),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"warmwatch_router_replicas_{name}", text, value=float(value))
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"warmwatch_router_replicas_{name}", text, value=float(value))
