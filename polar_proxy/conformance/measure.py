"""Run the scenarios with each harness, check the runs, and make the harness's row of the conformance report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness_adapters.base import HarnessAdapter, HarnessError, HarnessInfo, Installation
from polar_proxy.conformance import checks
from polar_proxy.conformance.checks import CHECKS, CheckResult
from polar_proxy.conformance.profiles import HarnessProfile, profile_of
from polar_proxy.conformance.report import CONFORMANCE
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner, choose_kind, temporary_store
from polar_proxy.conformance.scripted_model import (
    BASIC,
    RUN,
    SCENARIOS,
    FaultKind,
    Scenario,
    ScriptedModel,
    Step,
)
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.types import CallRecord, Json

Progress = Callable[[str], None]


@dataclass(slots=True)
class HarnessRow:
    """The measurements of one harness."""

    name: str
    version: str
    dialect: str = "-"
    streamed: str = "-"
    calls: int = 0
    edges: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    checks: dict[str, CheckResult] = field(default_factory=dict)
    scenarios: list[Json] = field(default_factory=list)
    seconds: float = 0.0


async def measure_conformance(
    adapters: Sequence[tuple[HarnessAdapter, str | None]],
    engine: Engine,
    sandbox: str,
    check_names: Sequence[str],
    *,
    cache: Path,
    slow: float,
    patience: float,
    progress: Progress,
) -> AsyncGenerator[Json, None]:
    """Measure the harnesses one after the other, and yield a document with the row of each harness.

    `adapters`: each adapter with the version to measure. If a harness cannot be installed, its checks are `not run`.
    """
    kind = await choose_kind(sandbox)
    async with temporary_store() as store, ScenarioRunner(engine, store, kind, patience=patience) as runner:
        for number, (adapter, version) in enumerate(adapters, 1):
            title = f"{number}/{len(adapters)} {adapter.name}: "
            try:
                if not await asyncio.to_thread(adapter.is_installed, cache, version):
                    progress(title + "installing (once; a minute or two)")
                installed = await asyncio.to_thread(adapter.install, cache, version)
            except HarnessError as error:
                row = HarnessRow(adapter.name, version or adapter.default_version)
                result = CheckResult("not run", f"could not be installed: {str(error)[:300]}")
                row.checks = dict.fromkeys(check_names, result)
            else:
                row, _ = await measure(
                    runner, adapter, installed, check_names, slow=slow, progress=progress, title=title
                )
            document = CONFORMANCE.document([asdict(row)], engine=engine.info, sandbox=kind, slow_seconds=slow)
            state = "ok" if CONFORMANCE.is_good(document) else "failed"
            counts = f"{row.calls} calls, {row.lost} lost, {row.doubled} recorded twice, {row.seconds:.0f} s"
            progress(f"{title}{row.version}: {state} ({counts})")
            yield document


async def measure(
    runner: ScenarioRunner,
    adapter: HarnessAdapter,
    installed: Installation,
    check_names: Iterable[str],
    *,
    slow: float,
    progress: Progress = lambda text: None,
    title: str = "",
) -> tuple[HarnessRow, list[ScenarioRun]]:
    """Run the scenarios that the checks need, and evaluate the checks. Return the row for the report, and the runs."""
    profile, started = profile_of(adapter), time.monotonic()
    scripted = isinstance(runner.engine, ScriptedEngine)
    wanted = [name for name in CHECKS if name in check_names]
    skipped = {name: result for name in wanted if (result := _skip(name, profile, adapter.info, scripted=scripted))}
    played: dict[str, list[ScenarioRun]] = {}
    for scenario in _needed_scenarios(set(wanted) - skipped.keys()):
        progress(title + scenario.title)
        played[scenario.name] = await _play(runner, profile, scenario, adapter, installed, slow)
    runs = [run for some in played.values() for run in some]
    row = _row(adapter, installed, runs)
    row.checks = {name: skipped.get(name) or _evaluate(name, played) for name in wanted}
    row.seconds = round(time.monotonic() - started, 1)
    return row, runs


def _skip(name: str, profile: HarnessProfile, info: HarnessInfo, *, scripted: bool) -> CheckResult | None:
    """Return a result without a run if the check does not apply to the harness or the engine; else None. `scripted`:
    whether the engine is the scripted one."""
    if CHECKS[name].scenario is None:
        return None
    if name in profile.not_applicable:
        return CheckResult("n/a", profile.not_applicable[name])
    if name == "second_turn" and "resume" not in info.features:
        return CheckResult("n/a", "it can continue its last conversation only when it is given an id")
    if name == "subagent" and profile.start_subagent is None:
        return CheckResult("n/a", "it has no sub-agents")
    if not scripted:
        return CheckResult("not run", "needs the scripted engine: the answers of another one are unknown")
    return None


def _needed_scenarios(check_names: Iterable[str]) -> list[Scenario]:
    names = {CHECKS[name].scenario for name in check_names}
    return [scenario for scenario in SCENARIOS if scenario.name in names] or [BASIC]


async def _play(
    runner: ScenarioRunner,
    profile: HarnessProfile,
    scenario: Scenario,
    adapter: HarnessAdapter,
    installed: Installation,
    slow: float,
) -> list[ScenarioRun]:
    """Run a scenario. Repeat a scenario with faults until every fault has occurred, or no new fault occurs in a run."""
    if not scenario.fills_context:
        profile = replace(profile, context_window=None)
    if not scenario.faults:
        model = ScriptedModel(profile, _adapted(scenario, profile, adapter.info), slow)
        return [await runner.play(model, adapter, installed)]
    runs: list[ScenarioRun] = []
    left: list[FaultKind] = list(scenario.faults)
    while left:
        # One fault in each step after the first, or in the only step of a harness that has one.
        faults = {0: left[0]} if profile.one_request_per_turn else dict(enumerate(left, 1))
        model = ScriptedModel(profile, scenario, slow, faults)
        runs.append(await runner.play(model, adapter, installed))
        occurred = {request.fault for request in model.requests}
        if occurred.isdisjoint(left):
            break
        left = [kind for kind in left if kind not in occurred]
    return runs


def _adapted(scenario: Scenario, profile: HarnessProfile, info: HarnessInfo) -> Scenario:
    """Adapt a scenario to a harness.

    A scenario that fills the context uses the commands in the harness's profile. In other scenarios, the second turn is
    left out if the harness cannot resume.
    """
    if scenario.fills_context:
        steps: tuple[Step, ...] = (*[(profile.filling_command,)] * profile.compaction_steps, "finish")
        return replace(scenario, steps=steps, second=(RUN, "finish") if profile.compacts_after_turn else ())
    return scenario if "resume" in info.features else replace(scenario, second=())


def _evaluate(name: str, played: Mapping[str, Sequence[ScenarioRun]]) -> CheckResult:
    check = CHECKS[name]
    if check.scenario is None:
        runs = [run for some in played.values() for run in some]
        no_calls = CheckResult("not run", "no call was made")
        return check.function(runs) if any(run.calls for run in runs) else no_calls
    if broken := [run for run in played[check.scenario] if run.fault is not None]:
        return CheckResult("not run", str(broken[0].fault))
    results = [check.function(run) for run in played[check.scenario]]
    return next((result for result in results if result.status != "not run"), results[-1])


def _row(adapter: HarnessAdapter, installed: Installation, runs: Sequence[ScenarioRun]) -> HarnessRow:
    calls = [call for run in runs for call in run.calls]
    return HarnessRow(
        name=adapter.name,
        version=installed.version,
        dialect=", ".join(name for name, _ in Counter(call.dialect for call in calls).most_common()) or "-",
        streamed=_streamed(calls),
        calls=len(calls),
        edges=dict(checks.edge_counts(calls).most_common()),
        lost=checks.count_lost(runs),
        doubled=checks.count_doubled(runs),
        scenarios=[_run_to_json(run) for run in runs],
    )


def _streamed(calls: Sequence[CallRecord]) -> str:
    kinds = {call.stream for call in calls if call.edge != "side_call"}
    return {frozenset({True}): "yes", frozenset({False}): "no", frozenset(): "-"}.get(frozenset(kinds), "both")


def _run_to_json(run: ScenarioRun) -> Json:
    return {
        "scenario": run.model.scenario.name,
        "starts": [
            {"exit_code": start.exit_code, "outcome": start.outcome, "seconds": round(start.seconds, 1)}
            for start in run.starts
        ],
        "requests": sum(exchange.model_call for exchange in run.exchanges),
        "calls": len(run.calls),
        "joined": checks.joined_retries(run),
        "edges": dict(checks.edge_counts(run.calls).most_common()),
        "status": dict(Counter(call.status for call in run.calls).most_common()),
        "fault": run.fault,
    }
