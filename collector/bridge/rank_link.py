"""The sockets of one rank: a SUB for live events and, while something is missing, a DEALER that asks for a replay.

ZeroMQ reconnects the SUB by itself when the engine comes back. A monitor tells of every connection, and a short replay then makes sure that
the engine is the one of before and that nothing was missed while the SUB was away. Each replay round has a DEALER of its own, closed at its
end, so that a late answer of one round can never be taken for the next one's. A round ends with the end marker or after silence, since
engines lose the marker. One thread owns a link.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from collector.bridge.decode import MAX_PAYLOAD_BYTES
from collector.bridge.rank_feed import RankFeed

log = logging.getLogger(__name__)

DRAIN_MESSAGES = 256  # of one socket in a row, so that one busy rank does not starve the others
ROUND_MAX_S = 120.0
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 5.0
SETTLE_S = 0.1  # from a connection until the engine surely knows of our subscription


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """replay_silence_s: a round ends after this long without an answer."""

    replay_silence_s: float = 2.0
    receive_high_water: int = 50_000


@dataclass(slots=True)
class _Round:
    socket: zmq.Socket[bytes]
    start: int
    began_s: float
    heard_s: float
    sent: bool = False


class RankLink:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], feed: RankFeed, events: str, replay: str | None, times: LinkTimes) -> None:
        self.feed = feed
        self.events = events
        self.replay = replay
        self._context = context
        self._times = times
        self._round: _Round | None = None
        self._next_round_s = 0.0
        self._pause_s = PAUSE_MIN_S
        self.connections = 0
        self.sub, self._monitor = _subscribe(context, events, times.receive_high_water)

    def __repr__(self) -> str:
        return f"RankLink({self.feed.source}, {self.events}, replay {self.replay})"

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those that may have something to read."""
        always = [self.sub, self._monitor]
        return always if self._round is None else [*always, self._round.socket]

    @property
    def busy(self) -> bool:
        """A replay is under way or due: look again soon."""
        return self._round is not None or (self.replay is not None and self.feed.wanted is not None)

    def read_live(self, clock: Callable[[], float]) -> bool:
        """Takes in what has come. Returns whether more may wait."""
        receive, on_live = self.sub.recv_multipart, self.feed.on_live
        for _ in range(DRAIN_MESSAGES):
            try:
                frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                return False
            on_live(frames, clock())
        return True

    def watch_connection(self, monotonic_s: float) -> None:
        """Reads the monitor: a connection made is a reason to verify."""
        while True:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.connections += 1
            self.feed.connected()
            self._next_round_s = monotonic_s + SETTLE_S
            self._pause_s = PAUSE_MIN_S

    def tend_replay(self, monotonic_s: float, clock: Callable[[], float]) -> bool:
        """Begins, continues or ends a replay round. Returns whether more answers may wait."""
        if self._round is None:
            wanted = self.feed.wanted
            if self.replay is None or wanted is None or monotonic_s < self._next_round_s:
                return False
            self._round = _Round(_dealer(self._context, self.replay), wanted, monotonic_s, monotonic_s)
            self.feed.replay_began()
        current = self._round
        if not current.sent:
            try:
                current.socket.send_multipart([b"", current.start.to_bytes(8, "big")], zmq.NOBLOCK)
                current.sent = True
                current.heard_s = monotonic_s
            except zmq.Again:  # not connected yet
                if monotonic_s - current.heard_s > self._times.replay_silence_s:
                    self._end_round(False, monotonic_s, clock())
                return False
        for _ in range(DRAIN_MESSAGES):
            try:
                frames = current.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if monotonic_s - current.heard_s > self._times.replay_silence_s or monotonic_s - current.began_s > ROUND_MAX_S:
                    self._end_round(False, monotonic_s, clock())
                return False
            current.heard_s = monotonic_s
            if self.feed.on_replay(frames, clock()):
                self._end_round(True, monotonic_s, clock())
                return False
        return True

    def _end_round(self, marker: bool, monotonic_s: float, now_s: float) -> None:
        assert self._round is not None
        answered = self._round.heard_s > self._round.began_s or marker
        self._round.socket.close(linger=0)
        self._round = None
        self.feed.replay_ended(marker, now_s)
        self._pause_s = PAUSE_MIN_S if answered else min(PAUSE_MAX_S, self._pause_s * 2)
        self._next_round_s = monotonic_s + self._pause_s

    def close(self) -> None:
        if self._round is not None:
            self._round.socket.close(linger=0)
            self._round = None
        self.sub.disable_monitor()
        self._monitor.close(linger=0)
        self.sub.close(linger=0)


def _subscribe(context: zmq.Context[zmq.Socket[bytes]], address: str, high_water: int) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The socket, and the monitor that gets a message for each connection that is ready."""
    socket = context.socket(zmq.SUB)
    socket.set_hwm(high_water)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 500),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
    try:
        if "*" in address:
            socket.bind(address)  # engines given a concrete address connect to it instead of binding their own
        else:
            socket.connect(address)
    except zmq.ZMQError:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        raise
    return socket, monitor


def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # no request waits for an engine that may be another one by the time it connects
    socket.setsockopt(zmq.RCVHWM, 20_000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.connect(address)
    return socket
