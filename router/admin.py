"""The router's admin endpoints, on a loopback port of their own, so that whoever may send requests may not change how they are routed.

GET    /policy                         {"pools": {"coder": "cost", ...}, "known": ["cost", ...]}
POST   /policy  {"policy": "...", "pool": "..."}   changes it from the next request on; without a pool, everywhere
GET    /shadows                        what policies without effect would have done, by pool
POST   /shadows {"policies": [...], "pool": "..."} sets them, with counts at 0; an empty list ends them
GET    /coefficients                   prefill coefficients by pool and hardware: in use, fitted, with errors
POST   /coefficients {"pool": "...", "hardware": ..., "version": "..."}   chooses by this version from now on
GET    /metrics                        for Prometheus, without the API key that the router's own port may ask for
GET    /workers                        who belongs to each pool, from which source, in what state, with how many requests
POST   /workers {"pool": "...", "url": "..."}      adds one; further keys as in the fleet file: name, engine, ranks, hardware
POST   /workers/POOL/NAME/drain        nothing new but what goes on there, and out when it is empty
POST   /workers/POOL/NAME/undrain      takes a drain or a removal back
POST   /workers/POOL/NAME/remove       nothing new from now on; what is on its way there may end. DELETE /workers/POOL/NAME is the same

Changes hold until the router ends: what is to stay belongs in the fleet file. Loopback alone does not keep out the pages that somebody
reads in a browser on this machine: what a page sends names its Origin, and is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import orjson
from pydantic import ValidationError

from router.http.asgi import BodyTooLarge, ClientLeft, Receive, Scope, Send, error_object, header, read_body, respond, respond_json
from router.policy.policies import POLICIES
from router.policy.shadows import MOST_SHADOWS
from router.pools import Pools, PoolState
from router.records.recorder import Recorder
from router.workers.membership import Membership, NotAllowed
from schemas.changes import Change
from schemas.fleet import Worker
from schemas.settings import explain

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 10
_KNOWN = (
    "there are GET /metrics, GET and POST /policy, /shadows, /coefficients and /workers, POST /workers/POOL/NAME/ and drain, undrain or "
    "remove, DELETE /workers/POOL/NAME"
)
_NO_PAGES = "web pages may not change the router: ask with curl or the like"

Deed = Callable[[bytes], None]


class Admin:
    """An ASGI application over the router's own state."""

    def __init__(
        self,
        pools: Pools,
        recorder: Recorder,
        router_name: str,
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
        metrics_page: Callable[[], bytes] | None = None,
    ) -> None:
        self._pools, self._recorder, self._router_name = pools, recorder, router_name
        self._membership, self._clock, self._metrics_page = membership, clock, metrics_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, parts = scope["method"], scope["path"].strip("/").split("/")
        if self._metrics_page is not None and (method, parts) == ("GET", ["metrics"]):
            await respond(send, 200, self._metrics_page(), b"text/plain; version=0.0.4; charset=utf-8")
            return
        tells = {
            "policy": self._policies, "workers": self._workers, "shadows": self._shadows, "coefficients": self._coefficients,
        }  # fmt: skip
        tell = tells.get(parts[0])
        change = None if method == "GET" else self._change(method, parts)
        if tell is None or (method == "GET" and len(parts) > 1) or (method != "GET" and change is None):
            await respond_json(send, 404, error_object(404, _KNOWN))
            return
        if change is not None:
            if header(scope, b"origin") is not None:
                await respond_json(send, 403, error_object(403, _NO_PAGES))
                return
            try:
                change(await read_body(receive, _MAX_BODY_BYTES))
            except ClientLeft:
                return
            except BodyTooLarge:
                await respond_json(send, 413, error_object(413, f"the body is over {_MAX_BODY_BYTES} bytes"))
                return
            except ValueError as e:
                await respond_json(send, 400, error_object(400, str(e)))
                return
        await respond_json(send, 200, tell())

    def _change(self, method: str, parts: list[str]) -> Deed | None:
        """What a request would do with its body; None: there is no such endpoint."""
        match method, parts:
            case "POST", ["policy"]:
                return self._set_policy
            case "POST", ["shadows"]:
                return self._set_shadows
            case "POST", ["coefficients"]:
                return self._adopt
            case "POST", ["workers"]:
                return self._add
            case "POST", ["workers", pool, name, ("drain" | "undrain" | "remove") as what]:
                act = {"drain": self._membership.drain, "undrain": self._membership.undrain, "remove": self._membership.remove}[what]
                return lambda _: act(pool, name, self._clock())
            case "DELETE", ["workers", pool, name]:
                return lambda _: self._membership.remove(pool, name, self._clock())
        return None

    def _policies(self) -> dict[str, Any]:
        return {"pools": {p.name: p.policy.name for p in self._pools}, "known": sorted(POLICIES)}

    def _shadows(self) -> dict[str, Any]:
        return {
            "pools": {
                p.name: [
                    {
                        "policy": s.policy.name, "version": s.policy.version, "decisions": s.decisions, "agreed": s.agreed,
                        "cached_tokens": s.cached_tokens, "chosen_cached_tokens": s.chosen_cached_tokens, "errors": s.errors,
                        "error": s.error, "mean_us": 1e6 * s.seconds / max(1, s.decisions + s.errors),
                    }
                    for s in p.shadows
                ]
                for p in self._pools
            },
            "known": sorted(POLICIES),
        }  # fmt: skip

    def _coefficients(self) -> dict[str, Any]:
        return {"coefficients": self._pools.book.page()}

    def _workers(self) -> dict[str, Any]:
        of = self._membership
        found = {p.name: [self._worker(p, w) for w in sorted(of.workers(p.name), key=lambda w: w.name)] for p in self._pools}
        return {"pools": {pool: {"workers": workers, "removed": of.removed(pool)} for pool, workers in found.items()}}

    def _worker(self, pool: PoolState, worker: Worker) -> dict[str, Any]:
        now_s = self._clock()
        targets = [t.number for t in pool.here() if t.worker == worker.name]
        pool.health.up_at(now_s)
        return {
            "name": worker.name,
            "url": worker.address,
            "engine": worker.engine,
            "ranks": worker.ranks,
            "hardware": worker.hardware,
            "source": self._membership.source_of(pool.name, worker.name),
            "state": pool.health.state(targets[0], now_s),
            "draining": bool(pool.draining[targets[0]]),
            "in_flight": pool.busy(worker.name),
        }

    def _add(self, body: bytes) -> None:
        """Raises ValueError that names the key and says what would be right."""
        _asked(body, *Worker.model_fields)
        try:
            worker = Worker.model_validate(orjson.loads(body))
        except ValidationError as e:
            raise NotAllowed(f"the body must be as {{'pool': 'coder', 'url': 'http://gpu-3:8000'}}: {explain(e)}") from e
        self._membership.add(worker.pool, worker, self._clock())

    def _set_shadows(self, body: bytes) -> None:
        """Raises ValueError that says what would be right."""
        asked = _asked(body, "policies", "pool")
        policies = asked.get("policies")
        if not isinstance(policies, list) or not all(isinstance(p, str) and p in POLICIES for p in policies):
            raise ValueError(f"the body must be {{'policies': a list of {', '.join(POLICIES)}}}, and may name a 'pool'")
        if len(policies) > MOST_SHADOWS or len(set(policies)) < len(policies):
            raise ValueError(f"'policies' must name at most {MOST_SHADOWS} policies, each once")
        pools = self._asked_pools(asked.get("pool"))
        for state in pools:
            self._pools.set_shadows(state.name, policies)
            self._tell_change(f"the shadow policies of {self._router_name} are {', '.join(policies) or 'none'}", state.name)

    def _adopt(self, body: bytes) -> None:
        """Raises ValueError that says what would be right."""
        asked = _asked(body, "pool", "hardware", "version")
        pool, hardware, version = (asked.get(k) for k in ("pool", "hardware", "version"))
        if not isinstance(pool, str) or not isinstance(version, str) or not isinstance(hardware, str | None):
            raise ValueError("the body must be as {'pool': 'coder', 'hardware': 'h100' or null, 'version': one of GET /coefficients}")
        before = {(e.pool, e.hardware): self._pools.book.in_use(e.pool, e.hardware).name for e in self._pools.book}
        self._pools.book.adopt(pool, hardware, version)
        if before[pool, hardware] != version:
            of = f"{self._router_name} for hardware {hardware}" if hardware else self._router_name
            self._tell_change(f"the prefill coefficients of {of} are {version}, no longer {before[pool, hardware]}", pool)

    def _asked_pools(self, pool: object) -> list[PoolState]:
        """All pools, or the one named. Raises ValueError that says which there are."""
        if pool is not None and not (isinstance(pool, str) and pool in self._pools.by_name):
            raise ValueError(f"there is no pool {pool!r}; there are {', '.join(self._pools.by_name)}")
        return list(self._pools) if pool is None else [self._pools.by_name[str(pool)]]

    def _tell_change(self, text: str, pool: str) -> None:
        log.info("pool %s: %s", pool, text)
        change = Change(time_s=time.time(), kind="policy", text=text[:2000], author=self._router_name, pool=pool)
        self._recorder.change(change.kind, change.model_dump_json().encode())

    def _set_policy(self, body: bytes) -> None:
        """Raises ValueError that says what would be right."""
        asked = _asked(body, "policy", "pool")
        if not isinstance(asked.get("policy"), str) or asked["policy"] not in POLICIES:
            raise ValueError(f"the body must be {{'policy': one of {', '.join(POLICIES)}}}, and may name a 'pool'")
        for state in self._asked_pools(asked.get("pool")):
            if state.policy.name == asked["policy"]:
                continue
            text = f"the policy of {self._router_name} is {asked['policy']}, no longer {state.policy.name}"
            self._pools.set_policy(state.name, asked["policy"])
            self._tell_change(text, state.name)


def _asked(body: bytes, *known: str) -> dict[str, Any]:
    """The body's keys; none at all where it is no object. Raises ValueError for a key that means nothing here: it may be a slip of one
    that would have said less."""
    asked = orjson.loads(body)
    if not isinstance(asked, dict):
        return {}
    for key in asked:
        if key not in known:
            raise ValueError(f"the key {key!r} is not known here; there are {', '.join(known)}")
    return asked
