"""Starts the dashboard's server: Streamlit in this process, with Plotly's library and two health pages beside it."""

from __future__ import annotations

import gc
import gzip
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamlit as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dashboard import site
from dashboard.components.chart import plotly_js, plotly_path
from dashboard.palette import THEME
from dashboard.settings import DashboardSettings
from schemas.settings import SettingsError
from schemas.tables.read import PublishedError

ENTRY = Path(__file__).parent / "entry" / "main.py"
_log = logging.getLogger(__name__)


def run(settings: DashboardSettings) -> int:
    """Serves until SIGINT or SIGTERM. Raises SettingsError when the address cannot be listened on."""
    port = _free_port(settings)
    if not _is_loopback(settings.host):
        _log.warning("listening on %s: the dashboard has no sign-in, whoever reaches it sees all", settings.host)
    here = site.Site.of(settings)
    site.install(here)
    address = f"http://{_printable(settings.host)}:{port}"

    @asynccontextmanager
    async def say_ready(_: st.App) -> AsyncIterator[None]:
        print(f"READY dashboard={address}", flush=True)
        yield

    app = st.App(ENTRY, routes=_routes(here), lifespan=say_ready)
    # Streamlit collects garbage after every run of a script, 50 ms with all that is imported here: what is alive now stays alive.
    gc.collect()
    gc.freeze()
    # Streamlit takes the folder of the running program for the app's, and its arguments for the script's.
    sys.argv = [str(ENTRY)]
    # uvicorn closes everything on these signals and raises them again when it is done: then the end is in good order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        app.run(config=_options(settings, port))
    finally:
        here.database.close()
    return 0


def _options(settings: DashboardSettings, port: int) -> dict[str, Any]:
    return {
        "server.address": settings.host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.runOnSave": False,
        "browser.gatherUsageStats": False,
        "browser.serverAddress": settings.host,
        "client.toolbarMode": "viewer",
        "client.showErrorDetails": "type",
        "runner.postScriptGC": False,
        "runner.magicEnabled": False,
        "logger.level": "warning",
        **THEME,
    }


def _routes(here: site.Site) -> list[Route]:
    packed = gzip.compress(plotly_js(), 6)
    forever = {"Cache-Control": "public, max-age=31536000, immutable"}

    async def plotly(request: Request) -> Response:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                packed, media_type="text/javascript", headers={**forever, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            )
        return Response(plotly_js(), media_type="text/javascript", headers=forever)

    async def alive(_: Request) -> Response:
        return JSONResponse({"alive": True})

    async def ready(_: Request) -> Response:
        try:
            snapshot = here.database.snapshot()
        except PublishedError as e:
            return JSONResponse({"ready": False, "why": str(e)}, status_code=503)
        return JSONResponse({"ready": True, "watermark": snapshot.watermark and snapshot.watermark.isoformat() + "Z"})

    return [Route(plotly_path(), plotly), Route("/healthz", alive), Route("/readyz", ready)]


def _free_port(settings: DashboardSettings) -> int:
    """The port to listen on, tried once, so that a wrong one is said plainly; for 0 one that is free now."""
    host, port = settings.host, settings.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as e:
        raise SettingsError(f"settings `host` and `port`: cannot listen on {host}:{port} ({e.strerror}); choose another --port") from e


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _printable(host: str) -> str:
    return f"[{host}]" if ":" in host else host
