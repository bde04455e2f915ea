"""The mock vLLM engine: ranks that run the scheduler in real time, and `warmwatch mock-engine`.

A rank is one prefix cache, one scheduler, one KV publisher and one loop: schedule a step, let its time pass, hand out tokens,
publish the step's events. All of it lives in one event loop, so nothing here is locked. Answers leave through `Ticket`s, which
the HTTP side (`http_app`) waits on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import orjson
import zmq

from router.prompts.asked import Asked
from router.prompts.tokens import LocalTokenizer
from schemas.block_hash import U32
from simulator.answers import AnswerWords
from simulator.kv_publisher import KvPublisher, free_endpoints
from simulator.metrics_page import RankMetrics, render
from simulator.openai_api import WRONG_FORM, ApiError, Completion
from simulator.prefix_cache import PrefixCache
from simulator.scheduler import Scheduler, SimRequest, Step
from simulator.settings import MockEngineSettings

log = logging.getLogger(__name__)

STEPS_BETWEEN_YIELDS = 64
"""Instant steps in a row before others get the loop."""
LONG_PROMPT_BYTES = 2_000
"""Longer prompts are tokenized in a thread: about a millisecond and more."""
REMEMBERED_PROMPTS = 256


class Ticket:
    """One request's way through a rank. `progress` wakes for each token, or only for the end when `whole`."""

    __slots__ = ("_waiter", "engine_died", "request", "whole")

    def __init__(self, request: SimRequest, whole: bool) -> None:
        self.request = request
        self.whole = whole
        self.engine_died = False
        self._waiter: asyncio.Future[None] | None = None

    async def progress(self, seen: int) -> None:
        """Waits until there are more than `seen` tokens (or, when `whole`, all of them), or the request is over."""
        request = self.request
        while not request.finished and (self.whole or request.produced <= seen):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineRank:
    """One data-parallel rank."""

    def __init__(self, settings: MockEngineSettings, rank: int, publisher: KvPublisher) -> None:
        self.settings = settings
        self.rank = rank
        self.publisher = publisher
        self.slow_factor = 1.0
        self._cost = settings.cost()
        self._tickets: dict[SimRequest, Ticket] = {}
        self._wake = asyncio.Event()
        self._start(settings.num_gpu_blocks)

    def _start(self, num_gpu_blocks: int) -> None:
        self.cache = PrefixCache(num_gpu_blocks, self.settings.block_size, self.settings.kv_hashes == "int")
        self.scheduler = Scheduler(self.cache, self.settings.max_num_seqs, self.settings.max_num_batched_tokens)
        self.metrics = RankMetrics(self.rank, self.settings.max_model_len)

    def submit(self, request: SimRequest, whole: bool) -> Ticket:
        ticket = Ticket(request, whole)
        request.arrived_s = time.monotonic()
        self._tickets[request] = ticket
        self.scheduler.add(request)
        self._wake.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """The client is gone."""
        if self._tickets.pop(ticket.request, None) is not None:
            self.scheduler.abort(ticket.request)
            self.metrics.aborted()
            ticket.wake()

    def restart(self, num_gpu_blocks: int | None = None) -> None:
        """As when the process dies and comes back: requests break, the cache is empty, counters and the sequence start at 0."""
        for request, ticket in self._tickets.items():
            self.scheduler.abort(request)
            ticket.engine_died = True
            ticket.wake()
        self._tickets.clear()
        self._start(num_gpu_blocks or self.cache.num_gpu_blocks)
        self.publisher.restart()

    async def run(self) -> None:
        """Steps until cancelled."""
        burst = 0
        while True:
            if not self.scheduler.has_work:
                self._wake.clear()
                burst = 0
                await self._wake.wait()
            scheduler = self.scheduler
            step = scheduler.schedule()
            now = time.monotonic()
            for request in step.admitted:
                request.scheduled_s = now
            self.metrics.step(step)
            seconds = self._cost.step_s(step) * self.slow_factor
            burst += 1
            if seconds > 0 or not step.work:
                await asyncio.sleep(max(seconds, 0.001))
            elif burst % STEPS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            if scheduler is self.scheduler:
                self._complete(step)

    def _complete(self, step: Step) -> None:
        produced = self.scheduler.complete(step, time.monotonic())
        # Events first: they leave about when the first token does, and a reader should not learn of the answer earlier.
        self.publisher.publish(time.time(), self.cache.take_events())
        metrics = self.metrics
        for request in produced:
            metrics.token(request, request.gap_s)
            ticket = self._tickets.get(request)
            if request.finished:
                metrics.finished(request)
                self._tickets.pop(request, None)
            if ticket is not None and (request.finished or not ticket.whole):
                ticket.wake()


class MockEngine:
    """All ranks of one server, and what they share."""

    def __init__(self, settings: MockEngineSettings) -> None:
        self.settings = settings
        self.tokenizer = LocalTokenizer.from_dir(settings.tokenizer)
        self.answers = AnswerWords(self.tokenizer)
        self.created = int(time.time())
        self.down_until_s = 0.0
        self._next_rank = 0
        self._remembered: OrderedDict[bytes, array[int]] = OrderedDict()
        self._context: zmq.Context[Any] = zmq.Context()
        self.ranks: list[EngineRank] = []
        try:
            for rank, endpoints in enumerate(
                free_endpoints(settings.host, settings.data_parallel_size, settings.kv_port, settings.kv_replay_port)
            ):
                publisher = KvPublisher(self._context, endpoints, rank, settings.kv_topic, settings.kv_buffer_steps)
                self.ranks.append(EngineRank(settings, rank, publisher))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for rank in self.ranks:
            rank.publisher.close()
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """All loops, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self.ranks:
                group.create_task(rank.run())
                group.create_task(rank.publisher.serve_replay())

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request: never more than the smallest rank can hold at once."""
        smallest = min(r.cache.capacity_blocks for r in self.ranks)
        return min(self.settings.max_model_len, smallest * self.settings.block_size)

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self.down_until_s

    async def prompt_ids(self, asked: Asked) -> list[array[int]]:
        """Token ids of each prompt. Raises ApiError for what the tokenizer can't take."""
        if asked.chat is not None:
            chat = asked.chat
            try:
                key = orjson.dumps((asked.special, chat.messages, chat.tools, chat.values))
            except orjson.JSONEncodeError as e:
                raise ApiError(400, "the chat is nested too deeply") from e
            found = [await self._remember(key, lambda: self.tokenizer.ids(self.tokenizer.rendered(chat), asked.special))]
        elif asked.texts:
            found = [await self._text_ids(text, asked.special) for text in asked.texts]
        else:
            found = [array("I", ids.tolist()) for ids in asked.ids]
        if asked.keep is not None:
            found = [ids[-asked.keep :] if asked.keep > 0 else ids[: -asked.keep] for ids in found]
        return found

    async def _text_ids(self, text: str, special: bool) -> array[int]:
        return await self._remember((b"t" if special else b"p") + text.encode(), lambda: self.tokenizer.text(text, special))

    async def _remember(self, key: bytes, encode: Callable[[], U32]) -> array[int]:
        found = self._remembered.get(key)
        if found is None:
            try:
                ids = await asyncio.to_thread(encode) if len(key) > LONG_PROMPT_BYTES else encode()
            except WRONG_FORM as e:  # UnsupportedPrompt among them
                raise ApiError(400, str(e)) from e
            found = array("I")
            found.frombytes(ids.tobytes())
            self._remembered[key] = found
            if len(self._remembered) > REMEMBERED_PROMPTS:
                self._remembered.popitem(last=False)
        return found[:]  # the request appends its answer

    def pick_rank(self, wanted: str | None) -> EngineRank:
        """The rank of header X-data-parallel-rank, else the next in turn."""
        if wanted is not None:
            if not wanted.isdigit() or int(wanted) >= len(self.ranks):
                raise ApiError(400, f"data_parallel_rank {wanted} is out of range [0, {len(self.ranks)}).")
            return self.ranks[int(wanted)]
        rank = self.ranks[self._next_rank]
        self._next_rank = (self._next_rank + 1) % len(self.ranks)
        return rank

    def submit(self, rank: EngineRank, request_id: str, ids: array[int], asked: Completion, seed: int) -> Ticket:
        """Queues a request. Raises ApiError when it is too long."""
        longest = self.max_model_len
        answer_tokens = asked.max_tokens or max(1, min(self.settings.answer_tokens, longest - len(ids)))
        if not ids:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        if len(ids) + answer_tokens > longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens. However, you requested {answer_tokens} output tokens and "
                f"your prompt contains {len(ids)} input tokens, for a total of {len(ids) + answer_tokens} tokens. Please reduce the "
                "length of the input prompt or the number of requested output tokens.",
                param="input_tokens",
            )
        table = rank.cache.open(
            request_id, ids, salt=asked.salt, lora_name=asked.lora, session_id=asked.session_id, full_report=asked.full_report
        )
        request = SimRequest(table, self.answers.draw(ids, answer_tokens, seed), reads_cache=asked.asked.reads_cache)
        return rank.submit(request, whole=not asked.stream)

    def reset_prefix_cache(self) -> bool:
        """True when every rank was reset."""
        results = [rank.cache.reset() for rank in self.ranks]  # each is asked, whatever the others say
        return all(results)

    # -- pages --------------------------------------------------------------------------------------------------------

    def kv_event_sources(self) -> bytes:
        return orjson.dumps({str(r.rank): r.publisher.source() for r in self.ranks})

    def metrics_page(self) -> bytes:
        for rank in self.ranks:
            v, waiting = rank.metrics.values, len(rank.scheduler.waiting)
            v["num_requests_running", ""] = len(rank.scheduler.running)
            v["num_requests_waiting", ""] = v["num_requests_waiting_by_reason", "capacity"] = waiting
            v["kv_cache_usage_perc", ""] = rank.cache.held_blocks / (rank.cache.num_gpu_blocks - 1)
        return render([r.metrics for r in self.ranks], self.settings.model, [self._cache_config(r) for r in self.ranks])

    def _cache_config(self, rank: EngineRank) -> dict[str, str]:
        blocks, size = rank.cache.num_gpu_blocks, self.settings.block_size
        return CACHE_CONFIG | {
            "engine": str(rank.rank),
            "block_size": str(size),
            "effective_attention_block_size": str(size),
            "num_gpu_blocks": str(blocks),
            "num_gpu_blocks_override": str(blocks),
            "kv_cache_size_tokens": str(blocks * size),
            "kv_cache_max_concurrency": str(blocks * size / self.settings.max_model_len),
        }

    # -- failures on demand -------------------------------------------------------------------------------------------

    def restart(self, num_gpu_blocks: int | None, down_s: float) -> None:
        for rank in self.ranks:
            rank.restart(num_gpu_blocks)
        self.down_until_s = time.monotonic() + down_s

    def state(self) -> bytes:
        """Ground truth, for tests and demonstrations."""
        return orjson.dumps(
            [
                {
                    "rank": r.rank,
                    "cached_blocks": r.cache.cached_blocks,
                    "held_blocks": r.cache.held_blocks,
                    "capacity_blocks": r.cache.capacity_blocks,
                    "running": len(r.scheduler.running),
                    "waiting": len(r.scheduler.waiting),
                    "next_sequence": r.publisher.sequence,
                    "slow_factor": r.slow_factor,
                }
                for r in self.ranks
            ]
        )


CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}
"""Labels of `vllm:cache_config_info` that do not change here."""
