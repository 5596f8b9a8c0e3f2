"""Look at the built site in a headless Chromium: wide and as on a phone, light and dark (`make docs-look`).

Pictures of the pages go to .look/. The program fails if a page asks another host for anything, reports an error or is
wider than the screen, and if a search finds nothing. Chromium must be on the path (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[2]
PAGES = (
    "index.html",
    "pipelines.html",
    "config-keys.html",
    "gallery.html",
    "design/walk.html",
    "reference/index.html",
    "reference/transforms.html",
    "examples/02_accumulate.html",
    "results/index.html",
)
SCREENS = {"wide": (1280, 900), "phone": (390, 844)}
FOUND = ".md-search-result__item"


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that writes no log."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def faults(browser: Browser, address: str, page: str, screen: str, scheme: str) -> Iterator[str]:
    """Take the picture of a page, and yield what is wrong with it."""
    width, height = SCREENS[screen]
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    seen: list[str] = []
    tab.on("request", lambda request: seen.append(request.url))
    tab.on("pageerror", lambda error: seen.append(f"error: {error}"))
    response = tab.goto(f"{address}/{page}")
    if response is None or not response.ok:
        yield "there is no such page"
    tab.wait_for_load_state("networkidle")
    name = f"{page.removesuffix('.html').replace('/', '-')}-{screen}-{scheme}.png"
    tab.screenshot(path=ROOT / ".look" / name)
    yield from (url for url in seen if not url.startswith((address, "data:", "blob:")))
    wide = tab.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        yield f"it is {wide} pixels wide"
    tab.close()


def search(tab: Page, address: str, words: str) -> Iterator[str]:
    """Search the site, and yield what is wrong."""
    tab.goto(f"{address}/index.html")
    tab.keyboard.press("/")
    tab.keyboard.type(words)
    try:
        tab.wait_for_selector(FOUND, timeout=20_000)
    except Exception:
        yield f"search: nothing found for {words}"
    tab.screenshot(path=ROOT / ".look" / "search.png")


def main(pages: list[str]) -> int:
    """Look at these pages, or at `PAGES`; return the number of faults."""
    (ROOT / ".look").mkdir(exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=ROOT / "site"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for page in pages or PAGES:
            for screen in SCREENS:
                for scheme in ("light", "dark"):
                    wrong += [f"{page}, {screen}: {it}" for it in faults(browser, address, page, screen, scheme)]
        wrong += search(browser.new_page(), address, "shard_optimizer")
        browser.close()
    print(*dict.fromkeys(wrong), sep="\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
