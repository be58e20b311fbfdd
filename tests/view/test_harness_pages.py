"""The pages in real Chromium with the recorded runs of six real harnesses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.config import Settings
from polar_proxy.store import Store, open_store
from polar_proxy.view.server import serve_pages
from tests.view.browser import DARK, NARROW, Tab, open_browser, open_tab
from tests.view.harness_runs import HARNESSES, record_harnesses
from tests.view.recorded_groups import RecordedGroup, RecordedMember, finish_group, train_group

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class HarnessRuns:
    """A database with a group of six rollouts, each of another harness, and a session with a sub-agent."""

    database: Path
    group: RecordedGroup
    subagent: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> HarnessRuns:
    database = tmp_path_factory.mktemp("harnesses") / "polar.db"

    async def record() -> tuple[RecordedGroup, str]:
        async with open_store(str(database)) as store:
            sessions = await record_harnesses(store)
            members = [RecordedMember(name, sessions[name][0], number / 5) for number, name in enumerate(HARNESSES)]
            group = await finish_group(store, members)
            await train_group(store, group.group_id)
            return group, sessions["claude-code"][1]

    return HarnessRuns(database, *asyncio.run(record()))


@pytest.fixture
async def store(runs: HarnessRuns, tmp_path: Path) -> AsyncIterator[Store]:
    copy = shutil.copy(runs.database, tmp_path / "polar.db")
    shutil.copytree(runs.database.parent / "artifacts", tmp_path / "artifacts")
    async with open_store(str(copy), create=False) as opened:
        yield opened


@pytest.fixture
async def pages(store: Store, tmp_path: Path) -> AsyncIterator[tuple[str, Any]]:
    settings = Settings(home=tmp_path / "home", engine={"kind": "scripted"})
    async with serve_pages(store, settings, 0) as url, open_browser() as browser:
        yield url, browser


async def paths_of(store: Store, runs: HarnessRuns) -> dict[str, str]:
    """Return the path of every kind of page, for each harness where a page shows one run."""
    paths = {name: f"/view/{name}" for name in ("rollouts", "sessions", "groups", "jobs", "training")}
    paths |= {
        "overview": "/",
        "group": f"/view/groups/{runs.group.group_id}",
        "comparison": "/view/compare?" + "&".join(f"run={one}" for one in runs.group.rollout_ids),
        "training run": "/view/training/run_first?with=run_second",
        "sub-agent": f"/view/sessions/{runs.subagent}",
    }
    for name, rollout_id in zip(HARNESSES, runs.group.rollout_ids, strict=True):
        row = await store.rollouts.get(rollout_id)
        assert row is not None
        calls = await store.calls.summaries(str(row.session_id))
        trace = max(await store.traces.summaries(str(row.session_id)), key=lambda one: one.length)
        paths |= {
            f"{name}: rollout": f"/view/rollouts/{rollout_id}",
            f"{name}: call": f"/view/calls/{calls[-1].call_id}",
            f"{name}: tokens": f"/view/traces/{trace.trace_id}",
        }
    return paths


async def open_page(tab: Tab, name: str, path: str) -> Any:
    page = await tab.open(path)
    if name.endswith("tokens"):
        await page.wait_for_selector("#tokens .t")
    if name == "group":
        await page.wait_for_selector(".beside")
    return page


@pytest.mark.parametrize("options", [{}, DARK, NARROW], ids=["light", "dark", "narrow"])
async def test_every_page_is_shown_and_axe_finds_nothing_serious(
    pages: tuple[str, Any], store: Store, runs: HarnessRuns, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    url, browser = pages
    found = {}
    paths = await paths_of(store, runs)
    async with open_tab(browser, url, **options) as tab:
        for name, path in paths.items():
            page = await open_page(tab, name, path)
            assert await page.locator("h1").count() == 1, name
            if problems := await tab.axe():
                found[name] = problems
            if options is NARROW:
                width = await page.evaluate("document.documentElement.scrollWidth")
                assert width <= 360, f"{name} is {width} pixels wide"
    with capsys.disabled():
        print(f"\n{len(paths)} pages of {len(HARNESSES)} harnesses: {len(found)} with a serious finding")
    assert found == {}


async def test_each_harness_shows_tools_results_edges_and_tokens(
    pages: tuple[str, Any], store: Store, runs: HarnessRuns
) -> None:
    url, browser = pages
    async with open_tab(browser, url) as tab:
        for name, rollout_id in zip(HARNESSES, runs.group.rollout_ids, strict=True):
            page = await tab.open(f"/view/rollouts/{rollout_id}")
            assert "ran-42" in await page.locator(".tool .result").first.inner_text(), name
            edges = await page.locator("#tree .edge").all_inner_texts()
            assert edges.count("continues") >= 2, (name, edges)
            await page.keyboard.press("t")
            await page.wait_for_url("**/sequence")
            await page.wait_for_load_state("networkidle")  # all tokens have arrived
            await page.fill("#search input", "step-")
            await page.press("#search input", "Enter")
            assert (await page.locator("#search output").inner_text()).startswith("1 of "), name
        page = await tab.open(f"/view/sessions/{runs.subagent}")
        assert await page.locator("#tree .edge.subagent").count() == 1  # its next call continues it


async def test_keys_lead_from_the_list_to_a_call(pages: tuple[str, Any], runs: HarnessRuns) -> None:
    url, browser = pages
    async with open_tab(browser, url) as tab:
        page = await tab.open("/view/rollouts")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/view/rollouts/roll_**")
        await page.keyboard.press("k")
        await page.wait_for_url("**?call=call_**")
