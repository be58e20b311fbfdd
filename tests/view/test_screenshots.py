"""The pictures of the documentation: pages of a real run of the bundled policy, as `make demo` makes it.

POLAR_SCREENSHOTS=1 writes them into docs/images.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polar_proxy.config import Settings
from polar_proxy.store import open_store
from polar_proxy.view.server import serve_pages
from tests.cli.process import POLAR, environment
from tests.view.browser import open_browser, open_tab

pytestmark = pytest.mark.full

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PAGES_OF = {"overview": 560, "rollout": 900, "tokens": 560}
"""Height of each picture in pixels."""
_MOST_BYTES = 300_000


async def run_demo(home: Path) -> Path:
    """Let the agent play one task four times. Return the database."""
    settings = {**environment(), "POLAR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    if "POLAR_CACHE_DIR" in os.environ:
        settings["POLAR_HARNESSES"] = os.environ["POLAR_CACHE_DIR"]
    command = [POLAR, "run", "swe-task", "--samples", "4", "--json"]
    await asyncio.to_thread(subprocess.run, command, env=settings, check=True, capture_output=True, timeout=280)
    return home / "polar.db"


async def take(browser: Any, url: str, path: str, file: Path, height: int, **options: Any) -> None:
    async with open_tab(browser, url, viewport={"width": 1280, "height": height}, **options) as tab:
        page = await tab.open(path)
        await page.wait_for_timeout(1000)  # until the parts that are loaded later are there
        await page.screenshot(path=str(file))
    await asyncio.to_thread(lambda: Image.open(file).convert("RGB").quantize(96).save(file, optimize=True))


async def test_pages_of_the_demo_are_pictured(tmp_path: Path) -> None:
    folder = IMAGES if os.environ.get("POLAR_SCREENSHOTS") else tmp_path
    folder.mkdir(exist_ok=True)
    database = await run_demo(tmp_path / "home")
    async with open_store(str(database), create=False) as store:
        solved = (await store.rollouts.find(where="reward>=1"))[-1]
        traces = await store.traces.summaries(str(solved.session_id))
        trace = max(traces, key=lambda one: one.length)
        calls = await store.calls.summaries(str(solved.session_id))
        paths = {
            "overview": "/",
            "rollout": f"/view/rollouts/{solved.rollout_id}?call={calls[2].call_id}",
            "tokens": f"/view/traces/{trace.trace_id}#{trace.prompt_length}",
        }
        async with (
            serve_pages(store, Settings(home=tmp_path / "home"), 0) as url,
            open_browser() as browser,
        ):
            for name, path in paths.items():
                await take(browser, url, path, folder / f"{name}.png", PAGES_OF[name])
            await take(browser, url, paths["tokens"], folder / "dark.png", 420, color_scheme="dark")
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.png")}
    assert all(size > 5000 for size in sizes.values())
    assert sum(sizes.values()) < _MOST_BYTES, sizes
