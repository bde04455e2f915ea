"""/metrics, /healthz and /readyz on a port of its own, from a thread that only reads."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from schemas.settings import SettingsError


class StatusPage:
    """ready: (yes or no, why). Raises SettingsError when the port can't be had."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, ready: Callable[[], tuple[bool, str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif path == "/healthz":
                    self._answer(200, b"alive\n", "text/plain")
                elif path == "/readyz":
                    yes, why = ready()
                    self._answer(200 if yes else 503, json.dumps({"ready": yes, "detail": why}).encode(), "application/json")
                else:
                    self._answer(404, b"there are /metrics, /healthz and /readyz\n", "text/plain")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise SettingsError(f"setting `metrics_port`: {port} is in use on {host}: name another one, or 0 for a free one") from e
            raise SettingsError(f"setting `metrics_host`: cannot listen on {host}:{port} ({e.strerror or e})") from e
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
