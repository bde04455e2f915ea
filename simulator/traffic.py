"""Agent traffic against any OpenAI address, with the client's own account of every request.

`Traffic.run` keeps `sessions` sessions going until its time or number of requests is up, then lets what is in flight end. Nothing
is retried: each request that was sent has exactly one record, ok or failed, so that whoever reads the other end can be checked.
(When the run itself is cancelled, requests in flight count as failed and have no record.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from simulator.sessions import AgentSession, Ask, sessions
from simulator.settings import TrafficSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times in seconds; None where there was none."""

    request_id: str
    session_id: str
    template: str
    tenant: str
    turn: int
    subagent: bool
    sent_at_s: float  # unix time
    status: int | None  # None: no HTTP answer
    error: str | None
    ttft_s: float | None
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(slots=True)
class TrafficReport:
    """Counts and records. `sent == ok + failed` once `Traffic.run` has returned."""

    sent: int = 0
    ok: int = 0
    failed: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    def hit_rate(self) -> float | None:
        """Cached share of the prompt tokens of answers that say so."""
        told = [r for r in self.records if r.prompt_tokens and r.cached_tokens is not None]
        prompt = sum(r.prompt_tokens or 0 for r in told)
        return sum(r.cached_tokens or 0 for r in told) / prompt if prompt else None

    def ttft_s(self, quantile: float) -> float | None:
        times = sorted(r.ttft_s for r in self.records if r.ttft_s is not None)
        return times[min(len(times) - 1, int(quantile * len(times)))] if times else None

    def summary(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "ok": self.ok,
            "failed": self.failed,
            "hit_rate": self.hit_rate(),
            "ttft_p50_s": self.ttft_s(0.5),
            "ttft_p90_s": self.ttft_s(0.9),
            "ttft_p99_s": self.ttft_s(0.99),
        }


class Traffic:
    """One run of traffic. `stop` ends it early: no new request, those in flight end by themselves."""

    def __init__(self, settings: TrafficSettings, on_record: Callable[[RequestRecord], None] | None = None) -> None:
        self.settings = settings
        self.report = TrafficReport()
        self.stamped: set[str] = set()
        """Templates whose system prompt begins with the time now, as a careless deploy would have it."""
        self._on_record = on_record
        self._stopping = asyncio.Event()
        self._sessions = sessions(settings)
        self._started = 0

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> TrafficReport:
        s = self.settings
        api_key = s.api_key.get_secret_value()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=s.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as client:
            if s.duration_s:
                asyncio.get_running_loop().call_later(s.duration_s, self.stop)
            async with asyncio.TaskGroup() as group:
                for slot in range(s.sessions):
                    group.create_task(self._slot(client, slot))
        return self.report

    async def _slot(self, client: aiohttp.ClientSession, slot: int) -> None:
        """One seat: a session after another. Seats begin spread over one think time."""
        await self._pause(self.settings.think_s[1] * slot / self.settings.sessions)
        while not self._is_over():
            await self._session(client, next(self._sessions))

    async def _session(self, client: aiohttp.ClientSession, session: AgentSession) -> None:
        failures = 0
        while not session.over and not self._is_over():
            side = session.subagents()
            if side:
                await asyncio.gather(*(self._request(client, session, ask, f"sub{n}") for n, ask in enumerate(side)))
            if self._is_over():
                return
            record, answer = await self._request(client, session, session.ask(), "")
            if record is None:
                return
            if record.ok:
                session.hear(answer, record.prompt_tokens)
            else:
                failures += 1
                if failures > 3:
                    return
            await self._pause(session.think_s())

    def _is_over(self) -> bool:
        limit = self.settings.max_requests
        return self._stopping.is_set() or (limit > 0 and self._started >= limit)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _request(self, client: aiohttp.ClientSession, session: AgentSession, ask: Ask, sub: str) -> tuple[RequestRecord | None, str]:
        if self._is_over():
            return None, ""
        self._started += 1
        self.report.sent += 1
        request_id = f"{session.session_id}-t{session.turn}{sub}-{self._started}"
        messages = ask.messages
        if session.template.name in self.stamped:
            head = f"Now it is {time.strftime('%Y-%m-%d %H:%M:%S')}. "
            messages = [{**messages[0], "content": head + messages[0]["content"]}, *messages[1:]]
        body: dict[str, Any] = {"model": self.settings.model, "messages": messages, "max_tokens": ask.max_tokens, "ignore_eos": True}
        if ask.tools:
            body |= {"tools": ask.tools, "tool_choice": "none"}
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {
            "X-Request-Id": request_id,
            "X-Session-ID": session.session_id + sub,
            "X-Warmwatch-Tenant": session.template.tenant,
            "X-Warmwatch-Route": session.template.name,
            "X-Warmwatch-Template": session.template.name,
            "Content-Type": "application/json",
        }
        answer = _Answer()
        sent_at, started = time.time(), time.monotonic()
        error: str | None = None
        try:
            url = f"{self.settings.url.rstrip('/')}/v1/chat/completions"
            async with client.post(url, data=orjson.dumps(body), headers=headers) as response:
                answer.status = response.status
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:200]}"
                elif ask.stream:
                    await answer.read_stream(response, started)
                else:
                    answer.read_whole(await response.read())
            if error is None and not answer.complete:
                error = "the answer broke off"
        except asyncio.CancelledError:
            self.report.failed += 1
            raise
        except TimeoutError:
            error = f"no answer within {self.settings.timeout_s:.0f} s"
        except (aiohttp.ClientError, OSError) as e:
            error = f"{type(e).__name__}: {e}"
        except (ValueError, LookupError, TypeError, AttributeError) as e:  # what reading JSON of another form raises; one answer's fault
            error = f"the answer is no chat completion ({type(e).__name__}: {e})"
        record = RequestRecord(
            request_id=request_id,
            session_id=headers["X-Session-ID"],
            template=session.template.name,
            tenant=session.template.tenant,
            turn=session.turn,
            subagent=bool(sub),
            sent_at_s=sent_at,
            status=answer.status,
            error=error,
            ttft_s=answer.ttft_s,
            duration_s=time.monotonic() - started,
            prompt_tokens=answer.usage.get("prompt_tokens"),
            cached_tokens=(answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            completion_tokens=answer.usage.get("completion_tokens"),
        )
        self._count(record)
        return record, answer.text

    def _count(self, record: RequestRecord) -> None:
        report = self.report
        if record.ok:
            report.ok += 1
        else:
            report.failed += 1
            log.info("request %s failed: %s", record.request_id, record.error)
        report.records.append(record)
        if self._on_record is not None:
            self._on_record(record)


class _Answer:
    """What has been read of one answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.ttft_s: float | None = None
        self.complete = False

    def read_whole(self, body: bytes) -> None:
        q = orjson.loads(body)
        self.text = q["choices"][0]["message"].get("content") or ""
        self.usage = dict(q.get("usage") or {})
        self.complete = True

    async def read_stream(self, response: aiohttp.ClientResponse, started: float) -> None:
        words: list[str] = []
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                self.complete = True
                break
            chunk = orjson.loads(data)
            self.usage = dict(chunk.get("usage") or self.usage)
            for choice in chunk.get("choices") or ():
                word = choice["delta"].get("content")
                if word:
                    if self.ttft_s is None:
                        self.ttft_s = time.monotonic() - started
                    words.append(word)
        self.text = "".join(words)


def run(settings: TrafficSettings) -> int:
    """Runs until its time is up or SIGINT or SIGTERM, then prints the summary as one JSON line. 1 when a request failed."""

    async def main() -> TrafficReport:
        traffic = Traffic(settings)
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, traffic.stop)
        return await traffic.run()

    report = asyncio.run(main())
    print(orjson.dumps(report.summary()).decode(), flush=True)
    return 0 if report.failed == 0 else 1
