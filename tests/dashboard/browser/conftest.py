"""A real server and a real browser. Without chromium these tests are skipped, and fail where CI is set: there they must run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
START_S = 60
# Nothing runs, nothing is a placeholder, all charts are drawn; and so it was a moment ago.
READY = """() => {
  const app = document.querySelector('[data-testid="stApp"]');
  const charts = [...document.querySelectorAll('.ww-chart')];
  const quiet = app && app.dataset.testScriptState === 'notRunning' && !document.querySelector('[data-testid=stSkeleton]')
    && document.querySelector('[class*=st-key-panel-], .st-key-ww-unavailable') && charts.every((c) => c.querySelector('.main-svg'));
  window.quietSince = quiet ? window.quietSince ?? performance.now() : undefined;
  return quiet && performance.now() - window.quietSince > 250;
}"""
# Streamlit's client looks for its server below the page's own address first, and at the root next; the first answers are 404.
_LOOKING_FOR_THE_SERVER = re.compile(r"/(workers|health|sql)/_stcore/(health|host-config)$")


@pytest.fixture(scope="module")  # not longer: while Playwright's own event loop runs in this thread, no asyncio test can
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Starts `warmwatch dashboard` on a data folder; gives its address."""
    started: list[subprocess.Popen[bytes]] = []
    logs = tmp_path_factory.mktemp("dashboard-logs")

    def start(data_dir: Path) -> str:
        port = _free_port()
        log = logs / f"{port}.log"
        command = [sys.executable, "-m", "warmwatch", "dashboard", "--data-dir", str(data_dir), "--port", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen([*command, "--stale-after-s", "1e9", "--poll-s", "0.5"], stdout=out, stderr=subprocess.STDOUT)
        started.append(process)
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _answers(address + "/healthz"):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the dashboard did not start:\n{log.read_text()}")
            time.sleep(0.1)
        return address

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        assert process.wait(timeout=20) == 0
    for log in logs.iterdir():
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def address(serve: Callable[[Path], str], data_dirs: dict[str, Path]) -> str:
    return serve(data_dirs["full"])


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address and waits until all is drawn. Any error of the console fails the test."""
    pages: list[Page] = []
    errors: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type == "error" and not _LOOKING_FOR_THE_SERVER.search(message.location.get("url", "")):
            errors.append(f"{message.text} {message.location}")

    def open_page(url: str, width: int = 1440, scheme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(15_000)
        page.on("console", listen)
        page.on("pageerror", lambda e: errors.append(str(e)))
        pages.append(page)
        page.goto(url)
        page.wait_for_function(READY)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not errors


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
