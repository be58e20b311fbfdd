"""The pictures of the documentation: pages of a real run of three harnesses on a real vLLM, and of a training run.

POLAR_SCREENSHOTS=1 writes them into docs/images; without it, the runs are shorter. vLLM serves the bundled policy,
which was trained on mini-swe-agent's short prompt and single tool only. To the long prompts of the other harnesses
(2,778 tokens from pi, 19,602 from codex) its answers are meaningless, so they fail their tasks.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polar_proxy.api import ApiContext
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.factory import POLAR_TINY, make_engine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store, open_store
from polar_proxy.view.router import create_view_router
from tests.cli.process import POLAR, environment
from tests.engines.test_vllm_real import serve
from tests.view.browser import open_browser, open_tab
from tests.view.visitors import add_key

pytestmark = pytest.mark.full

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
HARNESSES = ("mini-swe-agent", "pi", "codex")
HEIGHTS = {
    "overview": 620,
    "rollout": 900,
    "tokens": 800,
    "group": 820,
    "comparison": 820,
    "training": 760,
    "lists": 420,
    "sessions": 420,
    "groups": 330,
    "jobs": 330,
    "runs": 240,
    "call": 620,
    "remarks": 420,
    "login": 420,
}
"""Height of each picture in pixels."""
_MOST_BYTES = 800_000
ALL_GROUPS = ("--set", "keep_zero_variance_groups=true")
KEPT = bool(os.environ.get("POLAR_SCREENSHOTS"))
TRAINING = ("--steps", "4", "--samples", "4") if KEPT else ("--steps", "1", "--samples", "2", *ALL_GROUPS)
SOLVING = ("--samples", "4") if KEPT else ("--samples", "1", "--temperature", "0")
FAILING = ("--samples", "2") if KEPT else ("--samples", "1", "--max-tokens", "64")
"""Flags of the training run, and of the runs of harnesses that solve their task or fail: enough for the documentation,
or for a test."""


async def run(home: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a command with `--json` and return its rollouts."""
    settings = {**environment(), "POLAR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    settings["POLAR_HARNESSES"] = os.environ.get("POLAR_CACHE_DIR") or str(Path("~/.polar/harnesses").expanduser())
    command = [POLAR, *arguments, "--json"]
    done = await asyncio.to_thread(subprocess.run, command, env=settings, check=True, capture_output=True, timeout=800)
    rollouts: list[dict[str, Any]] = json.loads(done.stdout).get("rollouts", [])
    return rollouts


@pytest.fixture
def vllm() -> Iterator[str]:
    """Yield the URL of a vLLM that serves the bundled policy, with room for codex's long prompts."""
    yield from serve(POLAR_TINY, "--reasoning-parser", "qwen3", env={"POLAR_VLLM_LEN": "32768"})


async def record(home: Path, vllm: str) -> Path:
    """Train the policy, let three harnesses play, and repeat a rollout. Return the database."""
    training = (*TRAINING, "--groups", "1", "--run", str(home / "first"))
    await run(home, "train", "grpo", "--task", "swe-task", "--engine", "local", *training)
    engine = ("--engine", "vllm", "--engine-url", vllm, "--model", "polar-tiny")
    for harness in HARNESSES[1:]:
        await run(home, "run", "swe-task", "--harness", harness, *FAILING, *engine)
    played = await run(home, "run", "swe-task", "--harness", HARNESSES[0], *SOLVING, *engine)
    best = max(played, key=lambda rollout: rollout["reward"] or 0)
    await run(home, "run", "--repeat-of", best["rollout_id"], *engine)
    return home / "polar.db"


async def paths_of(store: Store) -> dict[str, str]:
    repetition = next(job for job in await store.jobs.find(limit=50) if job.repeat_of is not None)
    (again,) = await store.rollouts.find(job_id=repetition.job_id)
    solved = await store.rollouts.get(str(repetition.repeat_of))
    assert solved is not None
    trained = next(group.group_id for group in await store.groups.recent(50) if group.delivery is not None)
    session_id = str(solved.session_id)
    trace = max(await store.traces.summaries(session_id), key=lambda one: one.length)
    calls = await store.calls.summaries(session_id)
    (training,) = await store.training.runs()
    return {
        "overview": "/",
        "lists": "/view/rollouts",
        "sessions": "/view/sessions",
        "groups": "/view/groups",
        "jobs": "/view/jobs",
        "runs": "/view/training",
        "rollout": f"/view/rollouts/{solved.rollout_id}?call={calls[2].call_id}",
        "remarks": f"/view/rollouts/{solved.rollout_id}#remarks",
        "call": f"/view/calls/{calls[2].call_id}",
        "tokens": f"/view/traces/{trace.trace_id}#{trace.prompt_length}",
        "group": f"/view/groups/{trained}",
        "comparison": f"/view/compare?run={solved.rollout_id}&run={again.rollout_id}",
        "training": f"/view/training/{training.run_id}",
        "login": "/view/login",
    }


async def take(browser: Any, url: str, key: str, path: str, file: Path, height: int, **options: Any) -> None:
    view = {"viewport": {"width": 1280, "height": height}, "extra_http_headers": {"authorization": f"Bearer {key}"}}
    async with open_tab(browser, url, **view | options) as tab:
        page = await tab.open(path)
        await page.wait_for_timeout(2000 if KEPT else 200)  # until the parts that are loaded later are there
        await page.evaluate("document.querySelector('.foot span').textContent = '~/.polar/polar.db'")
        await page.screenshot(path=str(file))
    await asyncio.to_thread(
        lambda: Image.open(file).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(file, optimize=True)
    )


async def take_all(database: Path, folder: Path) -> None:
    """Write the pictures, from a server that has the engine of the run."""
    settings = Settings(home=database.parent, gateway={"port": 0})
    async with open_store(str(database), create=False) as store, make_engine(EngineSettings(kind="local")) as engine:
        paths = await paths_of(store)
        key = await add_key(store)
        solved = paths["remarks"].removeprefix("/view/rollouts/").partition("#")[0]
        await store.remarks.add("label", "anna", rollout_id=solved, text="clean")
        await store.remarks.add("rating", "anna", rollout_id=solved, rating=4)
        await store.remarks.add("note", "ben", rollout_id=solved, text="It ran no test after its change.")
        context = ApiContext(store, settings, engine=engine)
        async with Gateway(engine, store, settings.gateway) as gateway, open_browser() as browser:
            gateway.include(create_view_router(context, open_on_loopback=True))
            url = gateway.url
            for name, path in paths.items():
                await take(browser, url, key, path, folder / f"{name}.png", HEIGHTS[name])
            await take(browser, url, key, paths["tokens"], folder / "dark.png", 420, color_scheme="dark")
            narrow = {"viewport": {"width": 400, "height": 760}}
            await take(browser, url, key, paths["rollout"], folder / "narrow.png", 760, **narrow)


@pytest.mark.timeout(1800)
async def test_pages_of_a_run_of_three_harnesses_are_pictured(tmp_path: Path, vllm: str) -> None:
    folder = IMAGES if KEPT else tmp_path
    folder.mkdir(exist_ok=True)
    await take_all(await record(tmp_path / "home", vllm), folder)
    sizes = {file.stem: file.stat().st_size for file in folder.glob("*.png")}
    assert set(sizes) >= {*HEIGHTS, "dark", "narrow"}
    assert all(size > 5000 for size in sizes.values())
    assert sum(sizes.values()) < _MOST_BYTES, sizes
