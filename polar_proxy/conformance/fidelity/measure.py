"""One harness in one prompt mode: play, build, and count what became of every sampled token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness_adapters.base import HarnessAdapter, HarnessError, Installation
from polar_proxy.conformance import count
from polar_proxy.conformance.fidelity.explain import ExplainedDrift, explain
from polar_proxy.conformance.fidelity.script import SCENARIO, FidelityModel
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scenarios import Scenario
from polar_proxy.engines.base import Engine
from polar_proxy.traces import BuildResult, merged
from polar_proxy.traces.drift import drift_events
from polar_proxy.types import CallRecord, PromptMode, Trace
from sandboxes import SandboxError

SCORED_TOKENS = 200_000
"""Longer sequences are not scored again."""


@dataclass(slots=True)
class FidelityRow:
    """What was counted of one harness in one mode."""

    harness: str
    version: str
    mode: PromptMode
    template: str
    dialect: str = "-"
    outcomes: tuple[str, ...] = ()
    """How each start of the program ended."""
    detail: str = ""
    """What its adapter makes of a start that did not end well."""
    fault: str | None = None
    """Why it could not be played."""
    calls: int = 0
    bases: int = 0
    """Calls that extend a recorded answer by meaning."""
    continued: int = 0
    drifted: int = 0
    """Calls whose prompt leaves the tokens that were sampled, without a purpose: each splits a merged trace."""
    causes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Why calls were not continued."""
    edges: dict[str, int] = field(default_factory=dict)
    traces: int = 0
    recorded: int = 0
    """Tokens that were sampled."""
    trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained, by reason."""
    scored: int = 0
    """Tokens whose log-probabilities were computed again, teacher-forced, in the merged sequence."""
    largest: float | None = None
    """The largest difference between a recorded log-probability and that (nats)."""
    differences: list[ExplainedDrift] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def adds_up(self) -> bool:
        return self.recorded == self.trained + sum(self.excluded.values())


async def measure_one(
    bench: ScenarioRunner,
    adapter: HarnessAdapter,
    installed: Installation,
    mode: PromptMode,
    template: str,
    *,
    scenario: Scenario = SCENARIO,
    score: bool = True,
) -> tuple[FidelityRow, ScenarioRun]:
    """Play `scenario` with one harness on a bench of that mode and count. A run that cannot be played says so."""
    began = time.monotonic()
    row = FidelityRow(adapter.name, installed.version, mode, template)
    # Told its own window a harness would take this small tokenizer's long prompts for a full context.
    profile = replace(profile_of(adapter.name), window=bench.engine.info.context_length)
    fitting = scenario if "resume" in adapter.info.features else replace(scenario, second=())
    director = FidelityModel(profile, fitting, 0.0)
    try:
        run = await bench.play(director, adapter, installed)
    except (HarnessError, SandboxError, OSError, TimeoutError) as error:
        run = ScenarioRun(director)
        row.fault = f"{type(error).__name__}: {error}"
    await tell(row, run.calls, bench.engine, score=score)
    row.outcomes = tuple(start.outcome for start in run.starts)
    row.detail = "; ".join(start.detail for start in run.starts if start.outcome != "ok")[:300]
    if not run.calls and row.fault is None:
        row.fault = f"it asked no model: {row.detail}"
    row.seconds = round(time.monotonic() - began, 1)
    return row, run


async def tell(row: FidelityRow, calls: Sequence[CallRecord], engine: Engine, *, score: bool) -> None:
    """Fill the row with what these calls of one session are."""
    by_id = {call.call_id: call for call in calls}
    built = merged(calls)
    row.dialect = ", ".join(sorted({call.dialect for call in calls})) or "-"
    row.calls, row.traces = len(calls), len(built.traces)
    row.bases = sum(call.base_call_id is not None for call in calls)
    row.continued = sum(call.prompt_mode == "continue" for call in calls)
    row.reasons = dict(Counter(call.prompt_reason for call in calls if call.prompt_reason).most_common())
    row.edges = dict(count.edges(calls).most_common())
    found: Counter[str] = Counter()
    for drift in drift_events(calls, built.excluded):
        row.drifted += 1
        difference = await explain(engine, drift, by_id[drift.call_id], by_id[drift.base_call_id])
        row.differences.append(difference)
        found[" + ".join(difference.causes)] += 1
    row.causes = dict(found.most_common())
    _account(row, calls, built)
    if score:
        await _score(row, built.traces, engine)


def _account(row: FidelityRow, calls: Sequence[CallRecord], built: BuildResult) -> None:
    left: Counter[str] = Counter()
    for call in calls:
        sampled = sum(len(choice.token_ids) for choice in call.choices)
        row.recorded += sampled
        if call.call_id in built.excluded:
            left[built.excluded[call.call_id]] += sampled
    row.excluded = dict(left.most_common())
    row.trained = sum(int(trace.loss_mask.sum()) for trace in built.traces)


async def _score(row: FidelityRow, traces: Sequence[Trace], engine: Engine) -> None:
    """The longest of the merged sequences once more, in one teacher-forced pass."""
    fitting = [trace for trace in traces if len(trace.token_ids) <= min(SCORED_TOKENS, _room(engine))]
    if not fitting:
        return
    trace = max(fitting, key=lambda trace: int(trace.loss_mask.sum()))
    fresh = np.array(await engine.score(trace.token_ids.tolist()), dtype=np.float32)
    trained = trace.loss_mask[1:].astype(bool)
    row.scored = int(trained.sum())
    row.largest = float(np.abs(trace.logprobs[1:][trained] - fresh[trained]).max())


def _room(engine: Engine) -> int:
    return engine.info.context_length - 1
