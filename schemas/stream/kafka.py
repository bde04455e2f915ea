"""The stream in Kafka, through kafka-python.

    kafka://host:9092,host2:9092?security.protocol=SASL_SSL&sasl.mechanism=SCRAM-SHA-512&sasl.username=ww&sasl.password.file=/run/secrets/kafka

OPTIONS below is the whole list. A password comes from a file, never from the address, which is logged.

Writing: acks from all replicas, idempotent, zstd; kafka-python retries for as long as it takes, so that an outage loses and reorders
nothing. At most one batch of ours (4 MB) is inside the producer; the rest waits in the bounded buffer (buffer.py). A broker that
comes back empty gets the topics again that this process asked for.

Reading: no consumer group, no commits, no offset reset. kafka-python has had polls that stay empty despite records (its #3106), and an
unreachable broker also looks like an empty poll: so after QUIET_S without records the reader asks for the end offsets. No answer is
StreamUnavailable; an end beyond a position that does not move makes the consumer anew (`Reader.revived` counts); another topic id
is OffsetOutOfRange.

kafka-python's failed connections leave their sockets to the garbage collector (ResourceWarning), and its constructors leave a thread
behind when they fail: hence the probe with a plain socket first, and the client factory that lets us close what was begun.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.stream.base import (
    BadStreamUrl,
    OffsetOutOfRange,
    Partition,
    Reader,
    RecordTooLarge,
    Slice,
    StreamError,
    StreamUnavailable,
    TopicSpec,
    UnknownTopic,
)
from schemas.stream.buffer import BufferedStream, Delivery, Pending, Refused
from schemas.stream.partitioning import partition_of

with warnings.catch_warnings():
    # kafka-python 3.0 reads its schemas with importlib.resources.read_text, deprecated in Python 3.11 and 3.12 only.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
    from kafka import errors as kafka_errors
    from kafka.admin import OffsetSpec
    from kafka.net.compat import KafkaNetClient

BATCH_BYTES = 256 * 1024
FETCH_BYTES = 4 * 1024 * 1024
OVERHEAD_BYTES = 64 * 1024  # a batch's own headers, beside the records that max_record_bytes limits
FOREVER_MS = 2**31 - 1
QUIET_S = 3.0
PROBE_S = 1.0
STUCK_S = 2.0
REQUEST_S = 10.0

OPTIONS: Mapping[str, str] = {
    "security.protocol": "PLAINTEXT (default), SSL, SASL_PLAINTEXT or SASL_SSL",
    "sasl.mechanism": "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512",
    "sasl.username": "user name",
    "sasl.password.file": "path of a file that holds the password alone",
    "ssl.cafile": "path of the CA certificates (PEM) that sign the brokers'",
    "ssl.certfile": "path of this client's certificate (PEM)",
    "ssl.keyfile": "path of this client's key (PEM)",
    "ssl.check.hostname": "true (default) or false",
    "client.id": "name in the broker's logs and quotas. Default: warmwatch",
    "replication.factor": "replicas of the topics that we create. Default: the broker's",
    "connect.timeout.s": "how long to try to reach a broker before StreamUnavailable. Default: 5",
}
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_AUTH_ERRORS = (
    kafka_errors.AuthorizationError,
    kafka_errors.SaslAuthenticationFailedError,
)


class KafkaStream(BufferedStream):
    """See base.Stream."""

    def __init__(self, servers: str, options: Mapping[str, str]) -> None:
        _require_fast_checksum()
        self._servers = _parse_servers(servers)
        self._config, self._replication, self._connect_s = _parse_options(servers, options)
        self._config["bootstrap_servers"] = [f"{host}:{port}" for host, port in self._servers]
        super().__init__(f"Kafka at {self.address}")
        self._lock = threading.RLock()
        self._admin: KafkaAdminClient | None = None
        self._specs: dict[str, TopicSpec] = {}
        self._counts: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<KafkaStream {self.address}>"

    @property
    def address(self) -> str:
        return ",".join(self._config["bootstrap_servers"])

    def ensure_topics(self, specs: Iterable[TopicSpec]) -> None:
        specs = list(specs)
        self._specs.update((spec.name, spec) for spec in specs)  # first: a writer creates them when the broker is back
        self.create_missing(specs)

    def create_missing(self, specs: Sequence[TopicSpec] | None = None) -> None:
        """Create those of the topics (default: all that were ever asked for) that do not exist."""
        specs = list(self._specs.values()) if specs is None else specs
        if not specs:
            return
        with self._asking() as admin:
            names = [spec.name for spec in specs]
            there = {topic["name"] for topic in admin.describe_topics(names) if topic["error_code"] == 0}
            for spec in specs:
                if spec.name not in there:
                    with contextlib.suppress(kafka_errors.TopicAlreadyExistsError):
                        admin.create_topics({spec.name: _creation(spec, self._replication)})
            if set(names) - there:
                admin.wait_for_topics(names)

    def partitions(self, topic: str) -> int:
        count = len(self._describe(topic)["partitions"])
        self._counts[topic] = count
        return count

    def known_partitions(self, topic: str) -> int:
        """As `partitions`, from memory when it was asked before."""
        return self._counts.get(topic) or self.partitions(topic)

    def forget(self, topics: Iterable[str]) -> None:
        """Ask the broker again before the next `known_partitions`."""
        for topic in topics:
            self._counts.pop(topic, None)

    def start_offsets(self, topic: str) -> dict[int, int]:
        return self._offsets(topic, OffsetSpec.EARLIEST)

    def end_offsets(self, topic: str) -> dict[int, int]:
        return self._offsets(topic, OffsetSpec.LATEST)

    def identity(self, topic: str) -> str | None:
        topic_id = self._describe(topic).get("topic_id")
        return str(topic_id) if topic_id else None

    def held_bytes(self, topic: str) -> int | None:
        """Of each partition the largest replica, compressed, with the indexes left out."""
        wanted = {topic: list(range(self.partitions(topic)))}
        largest: dict[int, int] = {}
        with self._asking() as admin:
            for broker in admin.describe_log_dirs(wanted):
                for log_dir in broker["log_dirs"]:
                    for held in log_dir["topics"]:
                        for part in held["partitions"] if held["name"] == topic else ():
                            index = part["partition_index"]
                            largest[index] = max(largest.get(index, 0), part["partition_size"])
        return sum(largest.values()) if largest else None

    def delete_before(self, topic: str, offsets: Mapping[int, int]) -> None:
        self._describe(topic)
        with self._asking() as admin:
            admin.delete_records({TopicPartition(topic, partition): offset for partition, offset in offsets.items()})

    def bounds(self, parts: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        """Partition -> (start, end)."""
        wanted = [TopicPartition(*part) for part in parts]
        if not wanted:
            return {}
        with self._asking() as admin:
            starts = admin.list_partition_offsets(dict.fromkeys(wanted, OffsetSpec.EARLIEST))
            ends = admin.list_partition_offsets(dict.fromkeys(wanted, OffsetSpec.LATEST))
        return {(part.topic, part.partition): (starts[part].offset, ends[part].offset) for part in wanted}

    def _new_delivery(self) -> Delivery:
        return _KafkaDelivery(self)

    def _new_reader(self) -> Reader:
        return KafkaReader(self)

    def _disconnect(self) -> None:
        with self._lock:
            if self._admin is not None:
                self._admin.close()
                self._admin = None

    def limit(self, topic: str) -> int | None:
        spec = self._specs.get(topic)
        return None if spec is None else spec.max_record_bytes

    def connect(self, kind: Callable[..., Any], **config: Any) -> Any:
        """A kafka-python client that has reached a broker; StreamUnavailable leaves no thread behind."""
        self._probe()
        begun: list[KafkaNetClient] = []

        def begin(**client_config: Any) -> KafkaNetClient:
            begun.append(KafkaNetClient(**client_config))
            return begun[-1]

        bootstrap_ms = int(self._connect_s * 1000)
        with self.mapped():
            try:
                return kind(kafka_client=begin, bootstrap_timeout_ms=bootstrap_ms, **self._config, **config)
            except BaseException:
                for client in begun:
                    client.close()
                raise

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        """kafka-python's errors as ours."""
        try:
            yield
        except kafka_errors.KafkaError as error:
            raise self.as_stream_error(error) from error

    def as_stream_error(self, error: BaseException) -> StreamError:
        if isinstance(error, _AUTH_ERRORS):
            return StreamUnavailable(
                f"Kafka at {self.address} refuses us: check sasl.* and ssl.* of the address and the broker's ACLs ({error})"
            )
        if isinstance(error, kafka_errors.UnknownTopicOrPartitionError):
            return UnknownTopic(str(error))
        if isinstance(error, kafka_errors.RetriableError | kafka_errors.KafkaConnectionError):
            return self.away(error)
        return StreamError(f"Kafka at {self.address}: {error}")

    def away(self, why: object) -> StreamUnavailable:
        return StreamUnavailable(
            f"Kafka at {self.address} does not answer: check that the broker runs and that the address is right ({why})"
        )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[KafkaAdminClient]:
        with self._lock:
            if self._admin is None:
                self._admin = self.connect(KafkaAdminClient)
            try:
                with self.mapped():
                    yield self._admin
            except StreamUnavailable:
                # Begin anew the next time: a plain connect tells at once whether the broker is back.
                admin, self._admin = self._admin, None
                if admin is not None:
                    admin.close()
                raise

    def _probe(self) -> None:
        """Whether any bootstrap server accepts a connection, said within connect.timeout.s and in plain words."""
        refusals = []
        for host, port in self._servers:
            try:
                socket.create_connection((host, port), timeout=self._connect_s).close()
                return
            except OSError as error:
                refusals.append(f"{host}:{port} {error.strerror or error}")
        raise self.away("; ".join(refusals))

    def _describe(self, topic: str) -> dict[str, Any]:
        with self._asking() as admin:
            (found,) = admin.describe_topics([topic])
            error = kafka_errors.for_code(found["error_code"])
            if error in (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.InvalidTopicError):
                raise UnknownTopic(topic)
            if error is not kafka_errors.NoError:
                raise error(topic)
            described: dict[str, Any] = found
            return described

    def _offsets(self, topic: str, spec: OffsetSpec) -> dict[int, int]:
        wanted = [TopicPartition(topic, index) for index in range(self.partitions(topic))]
        with self._asking() as admin:
            found = admin.list_partition_offsets(dict.fromkeys(wanted, spec))
        return {part.partition: int(found[part].offset) for part in wanted}


class _KafkaDelivery:
    def __init__(self, stream: KafkaStream) -> None:
        self._stream = stream
        self._producer: KafkaProducer | None = None

    def check(self, topic: str, size_bytes: int) -> None:
        limit = self._stream.limit(topic)
        if limit is not None and size_bytes > limit:
            raise RecordTooLarge(limit, size_bytes)

    def deliver(self, batch: Sequence[Pending], report: Callable[[StreamError | None], None], give_up: threading.Event) -> Refused:
        if self._producer is None:
            self._stream.create_missing()
            self._producer = self._stream.connect(
                KafkaProducer,
                acks="all",
                enable_idempotence=True,
                compression_type="zstd",
                batch_size=BATCH_BYTES,
                linger_ms=50,  # batches fill up meanwhile; the flush below sends the rest at once
                delivery_timeout_ms=FOREVER_MS,
                max_block_ms=int(REQUEST_S * 1000),
                max_request_size=64 * 1024 * 1024,
                allow_auto_create_topics=False,
                metrics_enabled=False,
            )
        counts, refused = self._partition_counts(batch)
        sent: list[tuple[Pending, Any]] = []
        send = self._producer.send
        for pending in batch:
            topic, key, value, headers, timestamp_ms, _ = pending
            if topic not in counts:
                continue
            partition = partition_of(key, counts[topic])
            try:
                future = send(topic, value, key, list(headers) if headers else None, partition, timestamp_ms)
            except (kafka_errors.KafkaError, ValueError) as error:  # ValueError: the topic has not that partition any more
                refused.append((pending, self._failure(pending, error)))
            else:
                sent.append((pending, future))
        shrunk = self._await(counts, report, give_up)
        for pending, future in sent:
            if not future.is_done:
                why = "its partition is gone" if pending[0] in shrunk else "given up, perhaps delivered"
                refused.append((pending, self._stream.away(why)))
            elif future.failed():
                refused.append((pending, self._failure(pending, future.exception)))
        if any(not isinstance(error, RecordTooLarge | UnknownTopic) for _, error in refused):
            # The producer may be of no more use (fenced, out of sequence), the topics may be others: the next batch begins anew.
            self._stream.forget(counts)
            self.close()
        return refused

    def tend(self) -> None:
        pass

    def close(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            try:
                producer.close(timeout=0.5)
            except kafka_errors.KafkaTimeoutError:
                # Its close gives up before it has closed when records are left; without their batches it gets through.
                producer._sender.force_close()
                with contextlib.suppress(kafka_errors.KafkaTimeoutError):
                    producer.close(timeout=2)

    def _partition_counts(self, batch: Sequence[Pending]) -> tuple[dict[str, int], Refused]:
        """Before anything is sent, so that StreamUnavailable from here means that nothing was."""
        assert self._producer is not None
        counts: dict[str, int] = {}
        for topic in {pending[0] for pending in batch}:
            try:
                counts[topic] = self._stream.known_partitions(topic)
            except UnknownTopic:
                continue
            with self._stream.mapped():
                self._producer.partitions_for(topic)
        return counts, [(pending, UnknownTopic(pending[0])) for pending in batch if pending[0] not in counts]

    def _await(self, counts: Mapping[str, int], report: Callable[[StreamError | None], None], give_up: threading.Event) -> set[str]:
        """Wait until all that was sent is acknowledged or failed, or it is time to give up. Returns the topics that were made anew with
        fewer partitions than `counts`: what was sent to the others would wait for ever, and all behind it."""
        assert self._producer is not None
        began = time.monotonic()
        while True:
            try:
                self._producer.flush(timeout=0.5)
                return set()
            except kafka_errors.KafkaTimeoutError:
                waited_s = time.monotonic() - began
                if give_up.is_set():
                    return set()
                if waited_s >= STUCK_S:
                    report(self._stream.away(f"no acknowledgement for {waited_s:.0f} s"))
                    with contextlib.suppress(StreamError):
                        self._stream.create_missing()  # a broker that came back empty would refuse the topic for ever
                        if shrunk := {topic for topic, count in counts.items() if self._stream.partitions(topic) < count}:
                            return shrunk

    def _failure(self, pending: Pending, error: BaseException) -> StreamError:
        if isinstance(error, kafka_errors.MessageSizeTooLargeError | kafka_errors.RecordListTooLargeError):
            return RecordTooLarge(self._stream.limit(pending[0]), pending[5])
        return self._stream.as_stream_error(error)


class KafkaReader:
    """See base.Reader."""

    def __init__(self, stream: KafkaStream) -> None:
        self._stream = stream
        self._consumer: KafkaConsumer | None = None
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._identities: dict[str, str | None] = {}
        self._heard_at = 0.0
        self._lagging: dict[Partition, int] = {}
        self.revived = 0

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        identities = {topic: self._stream.identity(topic) for topic in {topic for topic, _ in offsets}}
        for part, (start, end) in self._stream.bounds(offsets).items():
            if not start <= offsets[part] <= end:
                raise OffsetOutOfRange(*part, offsets[part], start, end)
        if self._consumer is None:
            self._consumer = self._connect()
        self._positions, self._identities, self._paused = dict(offsets), identities, set()
        self._apply()

    def poll(self, timeout_s: float, max_records: int) -> list[Slice]:
        if self._consumer is None:
            if not self._positions:
                time.sleep(timeout_s)
                return []
            self._consumer = self._connect()
            self._apply()
        try:
            with self._stream.mapped():
                fetched = self._consumer.poll(int(timeout_s * 1000), max_records)
        except StreamError as error:
            self._raise_out_of_range(error)
            raise
        if not fetched:
            if time.monotonic() - self._heard_at >= QUIET_S:
                self._look_around()
            return []
        self._heard_at = time.monotonic()
        slices = []
        for part, records in fetched.items():
            self._positions[part.topic, part.partition] = records[-1].offset + 1
            slices.append(Slice(part.topic, part.partition, records))
        return slices

    def pause(self, parts: Iterable[Partition]) -> None:
        parts = [self._assigned(part) for part in parts]
        self._paused.update(parts)
        if self._consumer is not None:
            self._consumer.pause(*(TopicPartition(*part) for part in parts))

    def resume(self, parts: Iterable[Partition]) -> None:
        parts = [self._assigned(part) for part in parts]
        self._paused.difference_update(parts)
        if self._consumer is not None:
            self._consumer.resume(*(TopicPartition(*part) for part in parts))

    def seek(self, part: Partition, offset: int) -> None:
        self._positions[self._assigned(part)] = offset
        if self._consumer is not None:
            self._consumer.seek(TopicPartition(*part), offset)

    def position(self, part: Partition) -> int:
        return self._positions[self._assigned(part)]

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
            self._consumer = None

    def _assigned(self, part: Partition) -> Partition:
        if part not in self._positions:
            raise ValueError(f"{part[0]}[{part[1]}] is not assigned to this reader")
        return part

    def _connect(self) -> KafkaConsumer:
        return self._stream.connect(
            KafkaConsumer,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=FETCH_BYTES,
            fetch_max_wait_ms=250,
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )

    def _apply(self) -> None:
        """Make the consumer's assignment what ours is."""
        assert self._consumer is not None
        parts = {part: TopicPartition(*part) for part in self._positions}
        self._consumer.assign(list(parts.values()))
        for part, offset in self._positions.items():
            self._consumer.seek(parts[part], offset)
        if parts:
            self._consumer.resume(*parts.values())
        if self._paused:
            self._consumer.pause(*(parts[part] for part in self._paused))
        self._heard_at = time.monotonic()
        self._lagging = {}

    def _raise_out_of_range(self, error: StreamError) -> None:
        cause = error.__cause__
        if isinstance(cause, kafka_errors.LogTruncationError):
            bounds = self._stream.bounds(self._positions)
            for truncated in cause.divergent_offsets:
                part = (truncated.topic, truncated.partition)
                raise OffsetOutOfRange(*part, self._positions[part], *bounds[part], why="the broker lost records that were read") from cause
        if isinstance(cause, kafka_errors.OffsetOutOfRangeError):
            for part, (start, end) in self._stream.bounds(self._positions).items():
                if not start <= self._positions[part] <= end:
                    raise OffsetOutOfRange(*part, self._positions[part], start, end) from cause
            # Back in range meanwhile (a log that grew again): the caller polls on.
            raise StreamUnavailable(f"Kafka at {self._stream.address}: {cause}: poll again") from cause

    def _look_around(self) -> None:
        """Nothing came for QUIET_S: is the broker away, a topic new, or the consumer asleep?"""
        active = [part for part in self._positions if part not in self._paused]
        bounds = self._stream.bounds(active)
        for topic in {part[0] for part in active}:
            if self._stream.identity(topic) != self._identities[topic]:
                part = next(part for part in active if part[0] == topic)
                raise OffsetOutOfRange(*part, self._positions[part], *bounds[part], why="the topic was made anew; assign again")
        for part, (start, end) in bounds.items():
            if not start <= self._positions[part] <= end:
                raise OffsetOutOfRange(*part, self._positions[part], start, end)
        lagging = {part: self._positions[part] for part, (_, end) in bounds.items() if end > self._positions[part]}
        stalled = lagging.items() & self._lagging.items()
        self._heard_at = time.monotonic()
        if stalled:
            self.revived += 1
            self.close()  # the next poll connects anew, at our positions
        self._lagging = lagging


def _parse_servers(servers: str) -> list[tuple[str, int]]:
    parsed = []
    for server in servers.split(","):
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "@" in host:
            raise BadStreamUrl(f"kafka://{servers}: {server!r} must be host:port, as in kafka://broker1:9092,broker2:9092")
        parsed.append((host.strip("[]"), int(port)))
    return parsed


def _parse_options(servers: str, options: Mapping[str, str]) -> tuple[dict[str, Any], int, float]:
    """kafka-python's settings, the replication factor (-1: the broker's), seconds to connect."""

    def bad(key: str, message: str) -> BadStreamUrl:
        return BadStreamUrl(f"kafka://{servers}: {key}: {message}")

    config: dict[str, Any] = {
        "client_id": "warmwatch",
        "request_timeout_ms": int(REQUEST_S * 1000),
        "reconnect_backoff_max_ms": 1000,
    }
    replication, connect_s = -1, 5.0
    for key, value in options.items():
        match key:
            case "security.protocol":
                if value not in _PROTOCOLS:
                    raise bad(key, f"{value!r} must be one of {', '.join(_PROTOCOLS)}")
                config["security_protocol"] = value
            case "sasl.mechanism":
                config["sasl_mechanism"] = value
            case "sasl.username":
                config["sasl_plain_username"] = value
            case "sasl.password.file":
                try:
                    config["sasl_plain_password"] = Path(value).read_text().strip()
                except OSError as error:
                    raise bad(key, f"cannot read {value!r}: {error.strerror}") from error
            case "ssl.cafile" | "ssl.certfile" | "ssl.keyfile":
                if not Path(value).is_file():
                    raise bad(key, f"{value!r} is no file")
                config[key.replace(".", "_")] = value
            case "ssl.check.hostname":
                if value not in ("true", "false"):
                    raise bad(key, f"{value!r} must be true or false")
                config["ssl_check_hostname"] = value == "true"
            case "client.id":
                config["client_id"] = value
            case "replication.factor":
                if not value.isdecimal() or int(value) < 1:
                    raise bad(key, f"{value!r} must be a number of replicas, at least 1")
                replication = int(value)
            case "connect.timeout.s":
                try:
                    connect_s = float(value)
                except ValueError as error:
                    raise bad(key, f"{value!r} must be a number of seconds") from error
                if not 0 < connect_s < 3600:
                    raise bad(key, f"{value!r} must be between 0 and 3600 seconds")
            case "sasl.password":
                raise bad(key, "a password has no place in an address, which is logged: use sasl.password.file=/path")
            case _:
                raise bad(key, f"unknown option; known are {', '.join(OPTIONS)}")
    return config, replication, connect_s


def _creation(spec: TopicSpec, replication: int) -> dict[str, Any]:
    """What create_topics wants. Kafka deletes whole closed segments, so these are a tenth of what is kept."""
    configs = {
        "cleanup.policy": "delete",
        "max.message.bytes": str(max(spec.max_record_bytes, BATCH_BYTES) + OVERHEAD_BYTES),
        "retention.ms": "-1" if spec.retention_s is None else str(int(spec.retention_s * 1000)),
        "retention.bytes": "-1" if spec.retention_bytes is None else str(spec.retention_bytes),
    }
    if spec.retention_s is not None:
        configs["segment.ms"] = str(max(60_000, min(int(spec.retention_s * 100), 7 * 86_400_000)))
    if spec.retention_bytes is not None:
        configs["segment.bytes"] = str(max(16 * 1024 * 1024, min(spec.retention_bytes // 10, 1024**3)))
    return {"num_partitions": spec.partitions, "replication_factor": replication, "configs": configs}


def _require_fast_checksum() -> None:
    try:
        import crc32c  # noqa: F401
    except ImportError as error:
        raise StreamError(
            "the package crc32c is missing, without which kafka-python checks sums in Python, thirty times slower: "
            "pip install 'kafka-python[crc32c]'"
        ) from error
