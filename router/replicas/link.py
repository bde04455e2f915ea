"""The sockets between replicas: a PUB that all others hear, and a SUB to each of them.

    first event --at most FLUSH_S later--> one message --PUB--> the others' SUB --> Heard
    every STATE_S the full state, which is the heartbeat too

PUB and SUB, since nobody waits for anybody: a replica that is away, slow or gone costs the others nothing, what it misses is dropped by
ZeroMQ, and the next full state heals it. No request ever waits for this. IPv6 addresses work; the sockets reconnect by themselves.

The port must be private: who can speak there can make workers look busy or warm, and who listens sees load and keyed block names (never
prompts). With `secret` (32 bytes, the same for all replicas) the sockets speak CURVE: only who knows it can connect or be connected to, and
all is encrypted. One pair of keys for all is enough, since the replicas are one party; the public half is kept as secret as the other.

Rejected: Kafka (its end to end is slower than what is told here lives), one TCP connection each with acknowledgements (somebody to wait
for), a broker (one more thing to fail).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio
import zmq.utils.z85

from router.pools import Pools
from router.replicas.addresses import Lookup, resolved, system_lookup
from router.replicas.heard import Heard
from router.replicas.messages import MAX_BYTES, Message, Place, decode, encode
from router.replicas.outbox import Outbox, Sender
from router.settings import RouterSettings
from schemas.block_hash import U64
from schemas.settings import SettingsError

log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""An event waits no longer for others that go with it."""
STATE_S = 1.0
SILENCE_S = 3.5
"""Three states missed in a row."""
_LOOKUP_S = 5.0
_HIGH_WATER = 2000
"""Messages that wait for one slow replica, before what is newest is dropped for it."""


class Link:
    """start() and stop() on the loop. Raises SettingsError when it cannot listen."""

    def __init__(
        self,
        outbox: Outbox,
        heard: Heard,
        listen: str | None,
        peers: Sequence[str],
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        lookup: Lookup = system_lookup,
        flush_s: float = FLUSH_S,
        state_s: float = STATE_S,
    ) -> None:
        self.outbox, self.heard = outbox, heard
        self._peers, self._clock, self._lookup = tuple(peers), clock, lookup
        self._flush_s, self._state_s = flush_s, state_s
        self._context = zmq.asyncio.Context()
        self._secret = secret
        self._sub = self._context.socket(zmq.SUB)
        self._pub: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUB)
        self.connected: tuple[str, ...] = ()
        self.sent = 0
        self.bad_messages = 0
        self.errors = 0
        self._said_bad = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self._prepare()
            self.address = None if listen is None else self._bind(listen)
        except BaseException:
            self._close()
            raise

    def reserve(self, place: Place, prefill_s: float, streams: bool, blocks: U64, ttl_s: float) -> int:
        """See Outbox.reserve."""
        flight = self.outbox.reserve(place, prefill_s, streams, blocks, ttl_s)
        self._soon()
        return flight

    def first_token(self, flight: int) -> None:
        self.outbox.first_token(flight)
        self._soon()

    def free(self, flight: int, kept: bool) -> None:
        self.outbox.free(flight, kept)
        self._soon()

    @property
    def silent(self) -> int:
        """Addresses from which nobody speaks, as far as that can be told: one of them may be our own."""
        own = 1 if self.heard.counts.own else 0
        return max(0, len(self.connected) - own - len(self.heard.names))

    @property
    def trouble(self) -> str | None:
        """What a person should know, though the router routes on."""
        if not self.connected and self._peers:
            return f"replicas: {', '.join(self._peers)} leads to no address"
        return f"replicas: {self.silent} of {len(self.connected)} addresses are silent" if self.silent else None

    async def start(self) -> None:
        await self._connect()
        self._tasks = [asyncio.create_task(t) for t in (self._hear(), self._beat(), self._look_up())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._send(self.outbox.bye())
        self.heard.end_all(self._clock())
        self._close()

    def flush(self) -> None:
        """Tells what waits, now."""
        self._timer = None
        news = self.outbox.news()
        if news is not None:
            self._send(news)

    def beat(self) -> None:
        """The full state, and a look at who is silent."""
        self._send(self.outbox.state())
        self.heard.look(self._clock())

    def _soon(self) -> None:
        if self.outbox.is_full:
            if self._timer is not None:
                self._timer.cancel()
            self.flush()
        elif self._timer is None and self.outbox.waiting:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self.flush)

    def _send(self, message: Message) -> None:
        try:
            self._pub.send_multipart(encode(message), zmq.NOBLOCK)
            self.sent += 1
        except zmq.ZMQError as e:
            self.errors += 1
            log.debug("a message to the other replicas was not sent: %s", e)

    async def _hear(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            try:
                self.heard.hear(decode(frames), self._clock())
            except ValueError as e:
                self.bad_messages += 1
                if not self._said_bad:
                    log.warning("something on the replicas' port is no message of a replica (said once): %.300s", e)
                    self._said_bad = True
            except Exception:  # the top of this task's loop
                self.errors += 1
                log.exception("a message of a replica could not be booked")
            await asyncio.sleep(0)  # many at once must not hold up requests

    async def _beat(self) -> None:
        while True:
            try:
                self.beat()
            except Exception:  # the top of this task's loop
                self.errors += 1
                log.exception("the replicas' heartbeat failed")
            await asyncio.sleep(self._state_s)

    async def _look_up(self) -> None:
        while True:
            await asyncio.sleep(_LOOKUP_S)
            try:
                await self._connect()
            except Exception:  # the top of this task's loop
                self.errors += 1
                log.exception("the replicas' addresses could not be looked up")

    async def _connect(self) -> None:
        """Raises SettingsError for an address that cannot be one; those before it are connected to."""
        before, wanted = self.connected, await resolved(self._peers, self.connected, self._lookup)
        for address in before:
            if address not in wanted:
                with contextlib.suppress(zmq.ZMQError):
                    self._sub.disconnect(address)
        self.connected = tuple(a for a in before if a in wanted)
        for address in wanted:
            if address not in self.connected:
                try:
                    self._sub.connect(address)
                except zmq.ZMQError as e:
                    raise SettingsError(f"setting `replica_peers`: cannot connect to {address}: {e.strerror or e}") from e
                self.connected += (address,)
        if set(before) != set(self.connected):
            log.info("replicas at %s", ", ".join(self.connected) or "no address")

    def _prepare(self) -> None:
        for socket in (self._sub, self._pub):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._pub.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._pub.setsockopt(zmq.LINGER, 200)  # for the farewell
        self._sub.setsockopt(zmq.IPV6, 1)
        self._sub.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._sub.setsockopt(zmq.RECONNECT_IVL, 100)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        if self._secret is not None:
            secret = zmq.utils.z85.encode(self._secret)
            public = zmq.curve_public(secret)
            for socket in (self._sub, self._pub):
                socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._pub.setsockopt(zmq.CURVE_SERVER, 1)
            self._sub.setsockopt(zmq.CURVE_SERVERKEY, public)

    def _bind(self, listen: str) -> str:
        self._pub.setsockopt(zmq.IPV6, int("[" in listen))  # else an IPv4 address would be shown as one of IPv6
        try:
            self._pub.bind(listen)
        except zmq.ZMQError as e:
            raise SettingsError(f"setting `replica_listen`: cannot listen on {listen}: {e.strerror or e}; choose another address") from e
        address = self._pub.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        return address.decode().rstrip("\0")

    def _close(self) -> None:
        self._sub.close()
        self._pub.close()
        self._context.term()


def link_of(settings: RouterSettings, pools: Pools, clock: Callable[[], float]) -> Link | None:
    """None: no replicas are configured. Raises SettingsError."""
    if settings.replica_listen is None and not settings.replica_peers:
        return None
    run, key_id = secrets.token_hex(8), settings.key().key_id
    return Link(
        Outbox(Sender(settings.router_name, run, key_id)),
        Heard(pools, run, key_id, SILENCE_S),
        settings.replica_listen,
        settings.replica_peers,
        None if settings.replica_secret_file is None else _secret(settings.replica_secret_file),
        clock,
    )


def _secret(path: Path) -> bytes:
    """Never repeats what the file holds."""
    try:
        text = path.read_text().strip()
    except OSError as e:
        raise SettingsError(f"setting `replica_secret_file`: {path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError:  # not chained: it holds the file's bytes
        text = ""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise SettingsError(f"setting `replica_secret_file`: {path} must hold 64 hexadecimal digits; make it with: openssl rand -hex 32")
    return bytes.fromhex(text)
