"""Some turns of a harness in render mode, with whatever the model says: do its prompts keep the sampled tokens?"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from harness_adapters.base import HarnessAdapter, Installation
from polar_proxy.conformance.fidelity.measure import FidelityRow, tell
from polar_proxy.conformance.fidelity.script import SCENARIO, FidelityModel
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scenarios import Finish, Scenario
from polar_proxy.conformance.scripted_model import ScriptedModel
from polar_proxy.store import Store
from polar_proxy.types import CallRecord

TASK = "List the files of this folder with a command, read a.txt, write notes.txt about it, and say when it is done."
SECOND = "Now run one command that counts the words of notes.txt, and say what it printed."


class UnscriptedModel(ScriptedModel):
    """Says what the user says, and leaves the answers to the model."""

    task = TASK

    def instruction(self, turn: int) -> str:
        return self.task if turn == 0 else SECOND


async def watch(
    bench: ScenarioRunner,
    store: Store,
    adapter: HarnessAdapter,
    installed: Installation,
    *,
    turns: int,
    task: str = TASK,
    scripted: bool = False,
    seconds: float = 300.0,
) -> FidelityRow:
    """Let a harness make up to `turns` model calls on a bench in render mode, then stop it, and tell what its prompts
    are. `scripted`: the engine says the awkward answers of `script` instead of its own."""
    resumes = "resume" in adapter.info.features
    profile = replace(profile_of(adapter.name), max_steps=turns, window=bench.engine.info.context_length)
    director: ScriptedModel
    if scripted:
        director = FidelityModel(profile, SCENARIO if resumes else replace(SCENARIO, second=()), 0.0)
    else:
        scenario = Scenario("drift", "some turns", (Finish(),), second=(Finish(),) if resumes else (), seconds=seconds)
        director = UnscriptedModel(profile, scenario, 0.0)
        director.task = task
    made: list[CallRecord] = []
    enough = asyncio.Event()

    def seen(record: CallRecord) -> None:
        made.append(record)
        if len(made) >= turns:
            enough.set()

    bench.gateway.observe(seen)
    run = await _until(enough, bench.play(director, adapter, installed))
    calls: Sequence[CallRecord] = await store.calls.of_session(made[0].session_id) if made else ()
    row = FidelityRow(adapter.name, installed.version, "render", "-")
    row.outcomes = tuple(start.outcome for start in run.starts) if run is not None else ("stopped",)
    if not calls and run is not None and run.starts:
        row.fault = f"it asked no model: {run.last.detail[:300]}"
    await tell(row, calls[:turns], bench.engine, score=False)
    return row


async def _until(enough: asyncio.Event, playing: Coroutine[Any, Any, ScenarioRun]) -> ScenarioRun | None:
    """The run when it ends by itself; None when it was stopped because there was enough of it."""
    task = asyncio.create_task(playing)
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, waiting):
            one.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
