"""The router's admin endpoints, on a loopback port of their own, so that whoever may send requests may not change how they are routed.

GET  /policy                       {"pools": {"coder": "cost", ...}, "known": ["cost", ...]}
POST /policy  {"policy": "...", "pool": "..."}   changes it from the next request on; without a pool, everywhere

Loopback alone does not keep out the pages that somebody reads in a browser on this machine: what a page sends names its Origin, and is
refused.
"""

from __future__ import annotations

import logging
import time

import orjson

from router.http.asgi import BodyTooLarge, ClientLeft, Receive, Scope, Send, error_object, header, read_body, respond_json
from router.policy.policies import POLICIES
from router.pools import Pools
from router.records.recorder import Recorder
from schemas.changes import Change

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 10


class Admin:
    """An ASGI application over the router's own state."""

    def __init__(self, pools: Pools, recorder: Recorder, router_name: str) -> None:
        self._pools, self._recorder, self._router_name = pools, recorder, router_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/policy" or scope["method"] not in ("GET", "POST"):
            await respond_json(send, 404, error_object(404, "there are GET /policy and POST /policy"))
            return
        if scope["method"] == "POST":
            if header(scope, b"origin") is not None:
                await respond_json(send, 403, error_object(403, "web pages may not change the policy: ask with curl or the like"))
                return
            try:
                self._change(orjson.loads(await read_body(receive, _MAX_BODY_BYTES)))
            except ClientLeft:
                return
            except BodyTooLarge:
                await respond_json(send, 413, error_object(413, f"the body is over {_MAX_BODY_BYTES} bytes"))
                return
            except ValueError as e:
                await respond_json(send, 400, error_object(400, str(e)))
                return
        await respond_json(send, 200, {"pools": {p.name: p.policy.name for p in self._pools}, "known": sorted(POLICIES)})

    def _change(self, asked: object) -> None:
        """Raises ValueError that says what would be right."""
        if not isinstance(asked, dict) or not isinstance(asked.get("policy"), str) or asked["policy"] not in POLICIES:
            raise ValueError(f"the body must be {{'policy': one of {', '.join(POLICIES)}}}, and may name a 'pool'")
        pool = asked.get("pool")
        if pool is not None and not (isinstance(pool, str) and pool in self._pools.by_name):
            raise ValueError(f"there is no pool {pool!r}; there are {', '.join(self._pools.by_name)}")
        for state in self._pools if pool is None else (self._pools.by_name[pool],):
            if state.policy.name == asked["policy"]:
                continue
            text = f"the policy of {self._router_name} is {asked['policy']}, no longer {state.policy.name}"
            log.info("pool %s: %s", state.name, text)
            self._pools.set_policy(state.name, asked["policy"])
            change = Change(time_s=time.time(), kind="policy", text=text, author=self._router_name, pool=state.name)
            self._recorder.change(change.kind, change.model_dump_json().encode())
