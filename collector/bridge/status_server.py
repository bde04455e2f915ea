"""/metrics, /healthz and /readyz of a bridge."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from schemas.kv_events import WorkerId
from schemas.settings import SettingsError
from schemas.workers import BridgeHealth, Trust

_LABELS = ("pool", "worker", "rank")
_GAUGES = {"epoch", "seq", "resident_blocks", "peak_resident_blocks", "buffered_records"}


class BridgeMetrics(Collector):
    """Turns the health of all ranks into metric families when asked; keeps nothing."""

    def __init__(self, health: Callable[[], dict[WorkerId, BridgeHealth]], process: Callable[[], dict[str, float]]) -> None:
        self._health = health
        self._process = process

    def collect(self) -> Iterable[Metric]:
        health = self._health()
        for name, field in BridgeHealth.model_fields.items():
            if name in ("trust", "key_id"):
                continue
            kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = kind(f"warmwatch_bridge_{name}", field.description or f"{name} of the worker's cache", labels=_LABELS)
            for source, state in health.items():
                value = getattr(state, name)
                if value is not None:
                    family.add_metric([source.pool, source.worker, str(source.rank)], value)
            yield family
        trust = GaugeMetricFamily("warmwatch_bridge_trust", "1 for the present trust in the worker's index", labels=(*_LABELS, "trust"))
        for source, state in health.items():
            for level in Trust:
                trust.add_metric([source.pool, source.worker, str(source.rank), level], float(state.trust is level))
        yield trust
        keys = GaugeMetricFamily("warmwatch_bridge_hash_key", "1; the label key_id names the hash key", labels=(*_LABELS, "key_id"))
        for source, state in health.items():
            keys.add_metric([source.pool, source.worker, str(source.rank), state.key_id or ""], 1.0)
        yield keys
        for name, value in self._process().items():
            if name.endswith("_total"):
                yield CounterMetricFamily(f"warmwatch_bridge_{name.removesuffix('_total')}", "of the bridge's process", value=value)
            else:
                yield GaugeMetricFamily(f"warmwatch_bridge_{name}", "of the bridge's process", value=value)


def status_app(metrics: BridgeMetrics, alive: Callable[[], bool], ready: Callable[[], tuple[bool, dict[str, Any]]]) -> web.Application:
    registry = CollectorRegistry()
    registry.register(metrics)

    async def metrics_page(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"alive": alive()}, status=200 if alive() else 503)

    async def readyz(_: web.Request) -> web.Response:
        good, details = ready()
        return web.json_response({"ready": good, **details}, status=200 if good else 503)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics_page), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    return app


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listens. Returns the runner and the port. Raises SettingsError when the port cannot be had."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be had ({e.strerror})"
        raise SettingsError(f"setting `metrics_port`: {host}:{port} {why}; choose another one, or 0 for any free one") from e
    return runner, int(runner.addresses[0][1])
