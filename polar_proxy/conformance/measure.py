"""Run the scenarios of one harness and collect its row of the table."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness_adapters.base import HarnessAdapter, HarnessError, HarnessInfo, Installation
from polar_proxy.conformance import checks
from polar_proxy.conformance.checks import SCENARIO_CHECKS, CheckInput, CheckResult
from polar_proxy.conformance.profiles import HarnessProfile, profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scripted_model import (
    BASIC,
    SCENARIOS,
    FaultKind,
    Finish,
    RunCommands,
    Scenario,
    ScriptedModel,
    Step,
)
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.types import CallRecord, Json
from sandboxes import SandboxError

COUNTED_CHECKS = ("evidence", "recorded_first", "refused", "lost", "doubled")
"""Checks that are counted over all scenarios."""
CHECK_NAMES = (*SCENARIO_CHECKS, *COUNTED_CHECKS)
Progress = Callable[[str], None]


@dataclass(slots=True)
class HarnessRow:
    """The measurements of one harness."""

    name: str
    version: str
    dialect: str
    streamed: str
    calls: int = 0
    edges: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    checks: dict[str, CheckResult] = field(default_factory=dict)
    scenarios: list[Json] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.lost and not self.doubled and all(cell.status != "failed" for cell in self.checks.values())


async def install_and_measure(
    runner: ScenarioRunner,
    adapter: HarnessAdapter,
    version: str | None,
    check_names: Sequence[str],
    *,
    cache: Path,
    slow: float,
    progress: Progress,
) -> HarnessRow:
    """Install a harness if necessary and measure it. If it cannot be installed, its checks are `not run`."""
    try:
        if not await asyncio.to_thread(adapter.is_installed, cache, version):
            progress("installing (once; a minute or two)")
        installed = await asyncio.to_thread(adapter.install, cache, version)
    except HarnessError as error:
        row = HarnessRow(adapter.name, version or adapter.default_version, "-", "-")
        result = CheckResult("not run", f"could not be installed: {str(error)[:300]}")
        row.checks = dict.fromkeys(check_names, result)
        return row
    return await measure(runner, adapter, installed, check_names, slow=slow, progress=progress)


async def measure(
    runner: ScenarioRunner,
    adapter: HarnessAdapter,
    installed: Installation,
    check_names: Iterable[str],
    *,
    slow: float,
    progress: Progress,
    keep: Callable[[ScenarioRun], None] = lambda run: None,
) -> HarnessRow:
    """Run the scenarios that the checks need, and evaluate them. `keep` receives every run."""
    profile, started = profile_of(adapter.name), time.monotonic()
    wanted = list(check_names)
    results = {name: _not_applicable(name, profile, adapter.info) for name in wanted if name in SCENARIO_CHECKS}
    scripted = isinstance(runner.engine, ScriptedEngine)
    if not scripted:
        reason = "needs the scripted engine: the answers of another one are unknown"
        results = {name: result or CheckResult("not run", reason) for name, result in results.items()}
    runs: list[ScenarioRun] = []
    for scenario in _needed_scenarios(results) if scripted else [BASIC]:
        progress(scenario.title)
        played = await _play(runner, profile, scenario, adapter, installed, slow)
        runs += played
        for run in played:
            keep(run)
        for name in results:
            if results[name] is None and SCENARIO_CHECKS[name][0] == scenario.name:
                results[name] = _evaluate(name, profile, played)
    row = _row(adapter, installed, runs)
    row.checks = {name: result for name, result in results.items() if result is not None}
    row.checks |= {name: result for name, result in _count(runs, row).items() if name in wanted}
    row.seconds = round(time.monotonic() - started, 1)
    return row


def _not_applicable(name: str, profile: HarnessProfile, info: HarnessInfo) -> CheckResult | None:
    """Return the result `n/a` if the check does not apply to this harness, else None."""
    if name in profile.not_applicable:
        return CheckResult("n/a", profile.not_applicable[name])
    if name == "second_turn" and "resume" not in info.features:
        return CheckResult("n/a", "it can continue its last conversation only when it is given an id")
    if name == "subagent" and profile.start_subagent is None:
        return CheckResult("n/a", "it has none")
    return None


def _needed_scenarios(results: Mapping[str, CheckResult | None]) -> list[Scenario]:
    names = {SCENARIO_CHECKS[name][0] for name, result in results.items() if result is None}
    return [scenario for scenario in SCENARIOS if scenario.name in names] or [BASIC]


async def _play(
    runner: ScenarioRunner,
    profile: HarnessProfile,
    scenario: Scenario,
    adapter: HarnessAdapter,
    installed: Installation,
    slow: float,
) -> list[ScenarioRun]:
    """Run a scenario. One with faults is repeated until every fault was reached."""
    if not scenario.faults:
        model = ScriptedModel(profile, _adapted(scenario, profile, adapter.info), slow)
        return [await _play_once(runner, model, adapter, installed)]
    runs: list[ScenarioRun] = []
    left: list[FaultKind] = list(scenario.faults)
    while left:
        at_once = left[:1] if profile.one_request_per_turn else left
        faults = {number + (not profile.one_request_per_turn): kind for number, kind in enumerate(at_once)}
        model = ScriptedModel(profile, scenario, slow, faults)
        runs.append(await _play_once(runner, model, adapter, installed))
        hit = {request.fault for request in model.requests}
        if not hit & set(left):
            break
        left = [kind for kind in left if kind not in hit]
    return runs


def _adapted(scenario: Scenario, profile: HarnessProfile, info: HarnessInfo) -> Scenario:
    """Drop a second turn that the harness does not support; use as many commands as it takes to fill its context."""
    if scenario.fills_context:
        commands = (RunCommands((profile.filling_command,)) for _ in range(profile.compaction_steps))
        steps: tuple[Step, ...] = (*commands, Finish())
        return replace(scenario, steps=steps, second=(RunCommands(), Finish()) if profile.compacts_after_turn else ())
    return scenario if "resume" in info.features else replace(scenario, second=())


async def _play_once(
    runner: ScenarioRunner, model: ScriptedModel, adapter: HarnessAdapter, installed: Installation
) -> ScenarioRun:
    try:
        return await runner.play(model, adapter, installed)
    except (HarnessError, SandboxError, OSError, TimeoutError) as error:
        return ScenarioRun(model, fault=f"{type(error).__name__}: {error}")


def _evaluate(name: str, profile: HarnessProfile, runs: Sequence[ScenarioRun]) -> CheckResult:
    if broken := [run for run in runs if run.fault is not None]:
        return CheckResult("not run", str(broken[0].fault))
    results = [SCENARIO_CHECKS[name][1](CheckInput(profile, run)) for run in runs]
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
        lost=sum(checks.lost(run) for run in runs),
        doubled=sum(checks.doubled(run.calls) for run in runs),
        scenarios=[_run_to_json(run) for run in runs],
    )


def _streamed(calls: Sequence[CallRecord]) -> str:
    kinds = {call.stream for call in calls if call.edge != "side_call"}
    return {frozenset({True}): "yes", frozenset({False}): "no", frozenset(): "-"}.get(frozenset(kinds), "both")


def _count(runs: Sequence[ScenarioRun], row: HarnessRow) -> dict[str, CheckResult]:
    calls = [call for run in runs for call in run.calls]
    if not calls:
        return dict.fromkeys(COUNTED_CHECKS, CheckResult("not run", "no call was made"))
    refused = sum((checks.refused(run) for run in runs), Counter[str]())
    answers = sum(exchange.model_call and exchange.complete for run in runs for exchange in run.exchanges)
    no_evidence = checks.without_evidence(calls)
    early = sum(checks.sent_before_recorded(run) for run in runs)
    return {
        "evidence": _none_of(no_evidence, "answered calls without an id and a log-probability for every token"),
        "recorded_first": _none_of(early, "answers that were sent before they were recorded"),
        "refused": _none_of(sum(refused.values()), "; ".join(f"{n} x {what}" for what, n in refused.items())),
        "lost": _none_of(row.lost, f"of {answers} whole answers"),
        "doubled": _none_of(row.doubled, f"of {row.calls} calls"),
    }


def _none_of(found: int, what: str) -> CheckResult:
    return CheckResult("failed" if found else "ok", f"{found} {what}".strip())


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
