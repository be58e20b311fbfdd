"""Many fidelity runs, some at a time: each has an engine and a gateway of its own; server and store serve all."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import HarnessAdapter, Installation
from polar_proxy.conformance.fidelity.measure import FidelityRow, measure_one
from polar_proxy.conformance.runner import ScenarioRunner
from polar_proxy.engines.base import Engine
from polar_proxy.store import Store, open_store
from polar_proxy.types import EngineInfo, PromptMode
from sandboxes.base import SandboxKind

TEMPLATES = {
    "keeps": None,
    "strips": Path(__file__).with_name("strips_reasoning.jinja"),
}
"""keeps: the model's own template, which shows the reasoning of every turn; strips: one that shows it only behind the
last message of a user."""
MODES: tuple[PromptMode, ...] = ("continue", "render")


@dataclass(frozen=True, slots=True)
class FidelityJob:
    adapter: HarnessAdapter
    installed: Installation
    template: str
    mode: PromptMode


@dataclass(frozen=True, slots=True)
class PlayedJob:
    row: FidelityRow
    engine: EngineInfo


async def play(
    jobs: Sequence[FidelityJob],
    engine: Callable[[str], Engine],
    sandbox: SandboxKind,
    *,
    at_once: int = 1,
    patience: float = 1.0,
    score: bool = True,
    began: Callable[[FidelityJob], None] = lambda job: None,
) -> AsyncIterator[PlayedJob]:
    """Every job once, as they end. `engine(template)` makes a scripted engine that renders with that template."""
    gate = asyncio.Semaphore(at_once)

    async def one(store: Store, job: FidelityJob) -> PlayedJob:
        async with gate:
            began(job)
            made = engine(job.template)
            async with ScenarioRunner(made, store, sandbox, patience=patience, prompt_mode=job.mode) as bench:
                row, _ = await measure_one(bench, job.adapter, job.installed, job.mode, job.template, score=score)
                return PlayedJob(row, made.info)

    with tempfile.TemporaryDirectory(prefix="polar-fidelity-") as folder:
        async with open_store(f"sqlite:///{folder}/fidelity.db") as store:
            tasks = [asyncio.create_task(one(store, job)) for job in jobs]
            try:
                for done in asyncio.as_completed(tasks):
                    yield await done
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
