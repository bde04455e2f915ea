"""Fixtures that every package's tests may use, and kernels that are compiled before the first of them."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka_broker import Broker, missing

TESTS = Path(__file__).parent
COMPILED = {"router", "collector", "simulator", "truth", "e2e"}
"""Folders whose tests run a router or a collector, or what a virtual fleet has of them."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles kernels, or loads them, in nobody's time: on a new machine that takes longer than a test or a client may wait."""
    rooms = {item.path.relative_to(TESTS).parts[0] for item in session.items if item.path.is_relative_to(TESTS)}
    if session.config.option.collectonly or not rooms & COMPILED:
        return
    from collector import warm_up as collector  # here, since not every test has all of their packages
    from router import warm_up as router

    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    collector.warm_up(lambda text: None if reporter is None else reporter.write_line(text))
    router.warm_up()


def _require_kafka() -> None:
    lacking = missing()
    if lacking and os.environ.get("CI"):
        pytest.fail(f"Kafka tests must run in CI: {lacking}")
    if lacking:
        pytest.skip(f"no Kafka: {lacking}")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of one broker shared by the whole session: use topic names of your own. Mark users with @pytest.mark.kafka."""
    _require_kafka()
    broker = Broker(tmp_path_factory.mktemp("kafka"))
    try:
        broker.start()
        yield broker.bootstrap
    finally:
        broker.stop()


@pytest.fixture
def kafka_may_fail(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """For tests that take the broker away: kafka-python leaves the sockets of failed connections to the garbage collector, and its log
    records, which pytest keeps, hold their tracebacks."""
    with warnings.catch_warnings(), caplog.at_level(logging.CRITICAL + 1, "kafka"):
        warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
        yield
        gc.collect()


@pytest.fixture
def own_kafka(tmp_path: Path, kafka_may_fail: None) -> Iterator[Broker]:
    """A started broker of the test's own, to stop, kill and start again."""
    _require_kafka()
    data = tmp_path / "kafka"
    data.mkdir()
    broker = Broker(data)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
