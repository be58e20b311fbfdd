"""Real Chromium for the tests of the web page, and what each test must find of a page: no error, no foreign request."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
AXE = Path(os.environ.get("POLAR_AXE", Path.home() / ".polar/axe-core")) / "node_modules/axe-core/axe.min.js"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DARK: dict[str, Any] = {"color_scheme": "dark"}
NARROW: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}


class Tab:
    """A page in Chromium that records every error, and every request that leaves the server."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.on("console", lambda line: self.problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self._check(request.url))

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.problems.append(f"request to {url}")

    async def open(self, path: str) -> Any:
        await self.page.goto(self.url + path)
        return self.page

    async def axe(self) -> list[str]:
        """Return what axe finds that is serious or critical, as `rule: elements`."""
        if not AXE.exists():
            pytest.skip("axe-core is missing: scripts/with_services.sh installs it with npm")
        await self.page.evaluate(AXE.read_text())
        # By default axe also collects every element that passes, which are thousands on a page.
        violations = await self.page.evaluate("axe.run({resultTypes: ['violations']}).then(found => found.violations)")
        return [
            f"{one['id']}: {[node['html'][:120] for node in one['nodes']][:3]}"
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Any]:
    """Start Chromium. Skips the test if it is not installed."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: scripts/with_services.sh installs it (apt-get install chromium)")
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        pytest.skip("Playwright is missing: scripts/with_services.sh installs it (pip install playwright)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def open_tab(browser: Any, url: str, **options: Any) -> AsyncIterator[Tab]:
    """Open a tab of a server. At the end of the block there must have been no problem."""
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    tab = Tab(await context.new_page(), url)
    yield tab
    await context.close()
    assert tab.problems == []
