"""All scenarios with one harness, and the row of the table that they give."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness_adapters.base import HarnessAdapter, HarnessError, HarnessInfo, Installation
from polar_proxy.conformance import count
from polar_proxy.conformance.checks import SCENARIO_CHECKS, CheckInput, CheckResult
from polar_proxy.conformance.profiles import HarnessProfile, profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scenarios import BASIC, SCENARIOS, FaultKind, Finish, RunCommands, Scenario, Step
from polar_proxy.conformance.scripted_model import ScriptedModel
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.types import CallRecord, Json
from sandboxes import SandboxError

COUNTED_CHECKS = ("evidence", "recorded_first", "refused", "lost", "doubled")
"""Checks that are counted over all scenarios."""
CHECK_NAMES = (*SCENARIO_CHECKS, *COUNTED_CHECKS)
Progress = Callable[[str], None]


@dataclass(slots=True)
class HarnessRow:
    """What was measured of one harness."""

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


async def measure(
    bench: ScenarioRunner,
    adapter: HarnessAdapter,
    installed: Installation,
    checks: Iterable[str],
    *,
    slow: float,
    progress: Progress,
    keep: Callable[[ScenarioRun], None] = lambda run: None,
) -> HarnessRow:
    """Play what `checks` need and judge it. `keep` gets every run, for whoever wants to look at it."""
    profile, began = profile_of(adapter.name), time.monotonic()
    wanted = list(checks)
    judged = {check: _without_playing(check, profile, adapter.info) for check in wanted if check in SCENARIO_CHECKS}
    if not isinstance(bench.engine, ScriptedEngine):
        told = "needs the scripted engine: another one says what it likes"
        judged = {check: cell or CheckResult("not run", told) for check, cell in judged.items()}
    runs: list[ScenarioRun] = []
    for scenario in _needed(wanted, judged, isinstance(bench.engine, ScriptedEngine)):
        progress(scenario.title)
        played = await _play(bench, profile, scenario, adapter, installed, slow)
        runs += played
        for run in played:
            keep(run)
        for check in wanted:
            if check in judged and judged[check] is None and SCENARIO_CHECKS[check][0] == scenario.name:
                judged[check] = _judge(check, profile, adapter.info, played)
    row = _row(adapter, installed, runs)
    row.checks = {check: cell for check, cell in judged.items() if cell is not None}
    row.checks |= {check: cell for check, cell in _counted(runs, row).items() if check in wanted}
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _without_playing(check: str, profile: HarnessProfile, info: HarnessInfo) -> CheckResult | None:
    """The cell of a check that this harness cannot have."""
    if check in profile.missing:
        return CheckResult("n/a", profile.missing[check])
    if check == "second_turn" and "resume" not in info.features:
        return CheckResult("n/a", "it cannot go on with its last conversation without being given an id")
    if check == "subagent" and profile.delegate is None:
        return CheckResult("n/a", "it has none")
    return None


def _needed(wanted: Sequence[str], judged: Mapping[str, CheckResult | None], scripted: bool) -> list[Scenario]:
    if not scripted:
        return [BASIC]
    names = {SCENARIO_CHECKS[check][0] for check in wanted if check in SCENARIO_CHECKS and judged[check] is None}
    return [scenario for scenario in SCENARIOS if scenario.name in names] or [BASIC]


async def _play(
    bench: ScenarioRunner,
    profile: HarnessProfile,
    scenario: Scenario,
    adapter: HarnessAdapter,
    installed: Installation,
    slow: float,
) -> list[ScenarioRun]:
    if not scenario.faults:
        return [
            await _once(
                bench, ScriptedModel(profile, _fitting(scenario, profile, adapter.info), slow), adapter, installed
            )
        ]
    runs: list[ScenarioRun] = []
    left: list[FaultKind] = list(scenario.faults)
    while left:
        at_once = left[:1] if profile.one_answer else left
        faults = {number + (not profile.one_answer): kind for number, kind in enumerate(at_once)}
        director = ScriptedModel(profile, scenario, slow, faults)
        runs.append(await _once(bench, director, adapter, installed))
        hit = {asked.fault for asked in director.asked}
        if not hit & set(left):
            break
        left = [kind for kind in left if kind not in hit]
    return runs


def _fitting(scenario: Scenario, profile: HarnessProfile, info: HarnessInfo) -> Scenario:
    """Without a second turn where there can be none; with as many commands as it takes to fill a context."""
    if scenario.fills_context:
        steps: tuple[Step, ...] = (
            *(RunCommands((profile.fills_with,)) for _ in range(profile.compaction_steps)),
            Finish(),
        )
        return replace(scenario, steps=steps, second=(RunCommands(), Finish()) if profile.compacts_at_end else ())
    return scenario if "resume" in info.features else replace(scenario, second=())


async def _once(
    bench: ScenarioRunner, director: ScriptedModel, adapter: HarnessAdapter, installed: Installation
) -> ScenarioRun:
    try:
        return await bench.play(director, adapter, installed)
    except (HarnessError, SandboxError, OSError, TimeoutError) as error:
        run = ScenarioRun(director)
        run.fault = f"{type(error).__name__}: {error}"
        return run


def _judge(check: str, profile: HarnessProfile, info: HarnessInfo, runs: Sequence[ScenarioRun]) -> CheckResult:
    if broken := [run for run in runs if run.fault is not None]:
        return CheckResult("not run", str(broken[0].fault))
    cells = [SCENARIO_CHECKS[check][1](CheckInput(profile, info, run)) for run in runs]
    return next((cell for cell in cells if cell.status != "not run"), cells[-1])


def _row(adapter: HarnessAdapter, installed: Installation, runs: Sequence[ScenarioRun]) -> HarnessRow:
    calls = [call for run in runs for call in run.calls]
    row = HarnessRow(
        name=adapter.name,
        version=installed.version,
        dialect=", ".join(name for name, _ in Counter(call.dialect for call in calls).most_common()) or "-",
        streamed=_streamed(calls),
    )
    row.calls = len(calls)
    row.edges = dict(count.edges(calls).most_common())
    row.lost = sum(count.lost(run) for run in runs)
    row.doubled = sum(count.doubled(run.calls) for run in runs)
    row.scenarios = [_told(run) for run in runs]
    return row


def _streamed(calls: Sequence[CallRecord]) -> str:
    kinds = {call.stream for call in calls if call.edge != "side_call"}
    return {frozenset({True}): "yes", frozenset({False}): "no", frozenset(): "-"}.get(frozenset(kinds), "both")


def _counted(runs: Sequence[ScenarioRun], row: HarnessRow) -> dict[str, CheckResult]:
    calls = [call for run in runs for call in run.calls]
    bare = count.without_evidence(calls)
    late = sum(count.told_before_recorded(run) for run in runs)
    refused: Counter[str] = Counter()
    for run in runs:
        refused += count.refused(run)
    if not calls:
        return dict.fromkeys(COUNTED_CHECKS, CheckResult("not run", "no call was made"))
    answers = sum(exchange.model_call and exchange.complete for run in runs for exchange in run.exchanges)
    return {
        "evidence": _number(bare, "answered calls without an id and a log-probability for every token"),
        "recorded_first": _number(late, "answers that were told before they were recorded"),
        "refused": _number(sum(refused.values()), "; ".join(f"{n} x {what}" for what, n in refused.items())),
        "lost": _number(row.lost, f"of {answers} whole answers"),
        "doubled": _number(row.doubled, f"of {row.calls} calls"),
    }


def _number(found: int, what: str) -> CheckResult:
    return CheckResult("failed" if found else "ok", f"{found} {what}".strip())


def _told(run: ScenarioRun) -> Json:
    """One run, for the file."""
    return {
        "scenario": run.director.scenario.name,
        "starts": [
            {"exit_code": start.exit_code, "outcome": start.outcome, "seconds": round(start.seconds, 1)}
            for start in run.starts
        ],
        "requests": sum(exchange.model_call for exchange in run.exchanges),
        "calls": len(run.calls),
        "joined": count.joined(run),
        "edges": dict(count.edges(run.calls).most_common()),
        "status": dict(Counter(call.status for call in run.calls).most_common()),
        "fault": run.fault,
    }
