"""The door: every request is let in, or refused, before its body is read; the keys file is followed while the router runs.

    enter(scope) -> Visit       by key, expiry, requests a minute, requests at once, and tokens still owed
    visit.use(model)            once the body names a model
    visit.spend(tokens)         once the prompt is read
    visit.leave()               whatever became of it

Without a keys file the door is open: all are one nameless caller, and `x-warmwatch-tenant` is believed. With one, the tenant is the key's
and nobody's word is taken for it. `/healthz` and `/readyz` are open always, for who asks them has no key to give; what /readyz tells
without a key is yes or no. `/metrics` names workers and keys: it takes any key (Prometheus can send one), unless `open_metrics`.

A file that changed counts from the next request on (`follow`); what is on its way ends. A file that is broken then changes nothing: the old
keys hold, and the log, /readyz and `warmwatch_router_keys_broken` say so. Each replica counts for itself: with n of them behind a balancer
that spreads a key's requests, the key has up to n times its rate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from router.access.keys import Caller, Keyring, load_keys
from router.access.rates import Account, Denied, rate_headers
from router.access.refusal import Reason, Refused
from router.access.watched import Watched

log = logging.getLogger(__name__)

_OPEN = frozenset(("/healthz", "/readyz"))
_VISIT = "warmwatch.visit"
_LIMITS = {
    "requests": "requests a minute (requests_per_minute)",
    "tokens": "prompt tokens a minute (tokens_per_minute)",
    "in_flight": "requests at once (max_in_flight)",
}

Scope = MutableMapping[str, Any]


class Visit:
    """One request inside. caller None: the door is open."""

    __slots__ = ("_account", "_gate", "caller")

    def __init__(self, gate: Gate, caller: Caller | None, account: Account | None = None) -> None:
        self._gate, self.caller, self._account = gate, caller, account

    @property
    def tenant(self) -> str | None:
        """None: whoever the client says."""
        return None if self.caller is None else self.caller.tenant

    def may_use(self, model: str) -> bool:
        return self.caller is None or self.caller.models is None or model in self.caller.models

    def use(self, model: str | None) -> None:
        """Raises Refused when the key is not for this model. None: nobody can tell which one the request means."""
        if self.caller is None or self.caller.models is None or model in self.caller.models:
            return
        which = "every model, and this body is no JSON that tells which one it means" if model is None else f"the model `{model}`"
        raise self._gate.refused("model", f"the API key {self.caller.name} is not for {which}")

    def spend(self, prompt_tokens: int) -> None:
        """Raises Refused when the key has spent its tokens."""
        if self.caller is None or self._account is None:
            return
        denied = self._account.spend(self.caller.limits, prompt_tokens, self._gate.clock())
        if denied is not None:
            raise self._gate.limited(self.caller, self._account, denied)
        self._gate.tokens[self.caller.name] += prompt_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """x-ratelimit-* of an answer."""
        if self.caller is None or self._account is None:
            return []
        return rate_headers(self._account, self.caller.limits, self._gate.clock())

    def leave(self) -> None:
        """Again: nothing."""
        account, self._account = self._account, None
        if account is not None:
            account.leave()


class Gate:
    """One for the process, on the event loop. Raises SettingsError for a keys file that is not to be used."""

    def __init__(
        self,
        keys_file: Path | None,
        open_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self._wall_clock = clock, wall_clock
        self._file = keys_file
        self._watched = Watched([] if keys_file is None else [keys_file])
        self._keyring: Keyring | None = None if keys_file is None else load_keys(keys_file)
        self._accounts: dict[str, Account] = {}
        self._keyless = _OPEN | {"/metrics"} if open_metrics else _OPEN
        self._nobody = Visit(self, None)
        self.refusals: Counter[Reason] = Counter()
        self.requests: Counter[str] = Counter()  # by name of the key, since the start
        self.tokens: Counter[str] = Counter()
        self.trouble: str | None = None

    @property
    def is_open(self) -> bool:
        """Whoever reaches the port may send requests."""
        return self._keyring is None

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests inside by name of the key."""
        return {name: account.in_flight for name, account in self._accounts.items()}

    def enter(self, scope: Scope) -> Visit:
        """Raises Refused. `visit_of(scope)` gives the same visit later on."""
        scope[_VISIT] = visit = self._enter(scope)
        return visit

    def knows(self, scope: Scope) -> bool:
        """Whether the request may see what only callers may: any valid key, or an open door."""
        if self._keyring is None:
            return True
        try:
            self._keyring.authenticate(scope["headers"], self._wall_clock())
        except Refused:
            return False
        return True

    def refused(self, reason: Reason, text: str) -> Refused:
        self.refusals[reason] += 1
        return Refused(reason, text)

    def limited(self, caller: Caller, account: Account, denied: Denied) -> Refused:
        refused = self.refused(denied.what, f"the API key {caller.name} has reached its {_LIMITS[denied.what]}")
        refused.retry_after_s = denied.retry_after_s
        refused.headers = rate_headers(account, caller.limits, self.clock())
        return refused

    async def follow(self, every_s: float = 1.0) -> None:
        """Until cancelled: looks whether the keys file changed, and takes it over. One that could not be used is tried again: perhaps only
        its rights were wrong, and a key that was taken out must not live on."""
        while True:
            await asyncio.sleep(every_s)
            if self._file is None or not (self._watched.changed() or self.trouble is not None):
                continue
            try:
                keyring = await asyncio.to_thread(load_keys, self._file)
            except Exception as e:  # the top of this task's loop: whatever the file holds, the old keys stay
                before, self.trouble = self.trouble, f"the keys that were read before hold, for the file is not to be used: {e}"
                if self.trouble != before:
                    log.error("%s", self.trouble)
                continue
            self._take_over(keyring)

    def _take_over(self, keyring: Keyring) -> None:
        self._keyring, self.trouble = keyring, None
        self._accounts = {name: account for name, account in self._accounts.items() if name in keyring.names}
        for counted in (self.requests, self.tokens):
            for name in counted.keys() - keyring.names:
                del counted[name]
        log.info("the keys file changed: %d keys", len(keyring.names))

    def _enter(self, scope: Scope) -> Visit:
        path = scope["path"]
        if self._keyring is None or path in self._keyless:
            return self._nobody
        try:
            caller = self._keyring.authenticate(scope["headers"], self._wall_clock())
        except Refused as refused:
            self.refusals[refused.reason] += 1
            raise
        if path == "/metrics":
            return Visit(self, caller)
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = Account()
        denied = account.admit(caller.limits, self.clock())
        if denied is not None:
            raise self.limited(caller, account, denied)
        self.requests[caller.name] += 1
        return Visit(self, caller, account)


def visit_of(scope: Scope) -> Visit:
    """Of a request that `Gate.enter` let in."""
    visit: Visit = scope[_VISIT]
    return visit
