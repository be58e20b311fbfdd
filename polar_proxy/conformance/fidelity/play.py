"""Run fidelity measurements: all jobs with given answers, or some turns of one harness with a model's own answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness_adapters.base import HarnessAdapter, Installation
from polar_proxy.conformance.fidelity.answers import SCENARIO, FidelityModel
from polar_proxy.conformance.fidelity.measure import FidelityRow, count_tokens, measure_harness
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scripted_model import Finish, Scenario, ScriptedModel
from polar_proxy.engines.base import Engine
from polar_proxy.store import Store, open_store
from polar_proxy.types import CallRecord, EngineInfo, PromptMode
from sandboxes.base import SandboxKind

TEMPLATES = {
    "keeps": None,
    "strips": Path(__file__).with_name("strips_reasoning.jinja"),
}
"""Chat templates. keeps: the model's own, which shows the reasoning of every turn; strips: one that shows only the
reasoning after the last message of a user."""
MODES: tuple[PromptMode, ...] = ("continue", "render")
TASK = "List the files of this folder with a command, read a.txt, write notes.txt about it, and say when it is done."
SECOND_TASK = "Now run one command that counts the words of notes.txt, and say what it printed."


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
    make_engine: Callable[[str], Engine],
    sandbox: SandboxKind,
    *,
    concurrency: int = 1,
    patience: float = 1.0,
    score: bool = True,
    on_start: Callable[[FidelityJob], None] = lambda job: None,
) -> AsyncIterator[PlayedJob]:
    """Run every job once, and yield each when it ends.

    Each job has its own engine and gateway; the server and the store are shared. `make_engine(template)`
    returns a scripted engine that renders with that template.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(store: Store, job: FidelityJob) -> PlayedJob:
        async with slots:
            on_start(job)
            engine = make_engine(job.template)
            async with ScenarioRunner(engine, store, sandbox, patience=patience, prompt_mode=job.mode) as runner:
                row, _ = await measure_harness(runner, job.adapter, job.installed, job.mode, job.template, score=score)
                return PlayedJob(row, engine.info)

    with tempfile.TemporaryDirectory(prefix="polar-fidelity-") as folder:
        async with open_store(f"sqlite:///{folder}/fidelity.db") as store:
            tasks = [asyncio.create_task(run(store, job)) for job in jobs]
            try:
                for done in asyncio.as_completed(tasks):
                    yield await done
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class UnscriptedModel(ScriptedModel):
    """The user's side of a run: it gives the instructions and leaves the answers to the model."""

    task = TASK

    def instruction(self, turn: int) -> str:
        return self.task if turn == 0 else SECOND_TASK


async def measure_drift(
    runner: ScenarioRunner,
    store: Store,
    adapter: HarnessAdapter,
    installed: Installation,
    *,
    turns: int,
    task: str = TASK,
    scripted: bool = False,
    seconds: float = 300.0,
) -> FidelityRow:
    """Let a harness make up to `turns` model calls in render mode, stop it, and count how its prompts drifted.

    With `scripted` the engine gives the awkward answers of `answers.py` instead of its own.
    """
    resumes = "resume" in adapter.info.features
    profile = replace(profile_of(adapter.name), max_steps=turns, context_window=runner.engine.info.context_length)
    model: ScriptedModel
    if scripted:
        model = FidelityModel(profile, SCENARIO if resumes else replace(SCENARIO, second=()), 0.0)
    else:
        scenario = Scenario("drift", "some turns", (Finish(),), second=(Finish(),) if resumes else (), seconds=seconds)
        model = UnscriptedModel(profile, scenario, 0.0)
        model.task = task
    recorded: list[CallRecord] = []
    enough = asyncio.Event()

    def on_call(record: CallRecord) -> None:
        recorded.append(record)
        if len(recorded) >= turns:
            enough.set()

    runner.gateway.observe(on_call)
    run = await _run_until(enough, runner.play(model, adapter, installed))
    calls: Sequence[CallRecord] = await store.calls.of_session(recorded[0].session_id) if recorded else ()
    row = FidelityRow(adapter.name, installed.version, "render", "-")
    row.outcomes = tuple(start.outcome for start in run.starts) if run is not None else ("stopped",)
    if not calls and run is not None and run.starts:
        row.fault = f"it made no model request: {run.last.detail[:300]}"
    await count_tokens(row, calls[:turns], runner.engine, score=False)
    return row


async def _run_until(enough: asyncio.Event, playing: Coroutine[Any, Any, ScenarioRun]) -> ScenarioRun | None:
    """Return the run if it ends by itself; stop it and return None once `enough` is set."""
    task = asyncio.create_task(playing)
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
