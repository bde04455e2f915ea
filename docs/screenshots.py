"""Pictures of a running dashboard, each page in light and dark, wide and narrow, for the documentation and for looking at one's work.

    python docs/screenshots.py http://127.0.0.1:8501 docs/screenshots

Needs Debian's chromium and the Python package playwright. A page is taken when all its charts are drawn and nothing runs any more.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = "/usr/bin/chromium"
PAGES = {"now": "", "workers": "workers", "health": "health", "sql": "sql"}
WIDTHS = {"wide": 1440, "narrow": 420}
# Streamlit's client looks for its server below the page's own address first; these answers are 404.
SEARCHING = re.compile(r"/(workers|health|sql)/_stcore/(health|host-config)$")
# Nothing runs, nothing is a placeholder, all charts are drawn; and so it was a moment ago.
READY = """() => {
  const app = document.querySelector('[data-testid="stApp"]');
  const charts = [...document.querySelectorAll('.ww-chart')];
  const quiet = app && app.dataset.testScriptState === 'notRunning' && !document.querySelector('[data-testid=stSkeleton]')
    && document.querySelector('[class*=st-key-panel-], .st-key-ww-unavailable') && charts.every((c) => c.querySelector('.main-svg'));
  window.quietSince = quiet ? window.quietSince ?? performance.now() : undefined;
  return quiet && performance.now() - window.quietSince > 250;
}"""


def take(browser: Browser, address: str, query: str, width: int, scheme: str, target: Path) -> list[str]:
    """Writes one picture; returns errors of the console."""
    errors: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" and not SEARCHING.search(m.location["url"]) else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.goto(address + query)
    page.wait_for_function(READY, timeout=30_000)
    if page.get_by_role("button", name="Run", exact=True).count():
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_selector("[data-testid=stDataFrame]")
        page.wait_for_function(READY, timeout=30_000)
    page.wait_for_timeout(700)  # Tables are drawn on canvases that say nothing when they are done.
    height = int(page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight")) + 24
    page.set_viewport_size({"width": width, "height": max(700, min(height, 6000))})
    page.wait_for_timeout(700)
    page.screenshot(path=target)
    page.close()
    return errors


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("url", help="address of the dashboard")
    arguments.add_argument("folder", type=Path, help="where the pictures go")
    arguments.add_argument("--only", default="", help="expression that the picture's name must contain, such as now-wide")
    arguments.add_argument("--query", default="", help="filters of the address, such as worker=gpu-3:8000")
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    trouble = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for page, path in PAGES.items():
            for size, width in WIDTHS.items():
                for scheme in ("light", "dark"):
                    name = f"{page}-{size}-{scheme}"
                    if not re.search(given.only, name):
                        continue
                    query = f"?{given.query}" if given.query else ""
                    errors = take(browser, f"{given.url.rstrip('/')}/{path}", query, width, scheme, given.folder / f"{name}.png")
                    print(name, *errors, sep="\n  ", flush=True)
                    trouble += bool(errors)
        browser.close()
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
