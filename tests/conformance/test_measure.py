"""Checks pass for an agent that does everything right, and each fails for a variant that does one thing wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.conformance.checks import CHECKS
from polar_proxy.conformance.measure import HarnessRow, measure
from polar_proxy.conformance.report import CONFORMANCE
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import StoreError
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, new_id
from tests.conformance.small_agent import ForgetfulAgent, LyingAgent, RewritingAgent, SmallAgent

pytestmark = pytest.mark.slow

Save = Callable[[CallRecord], Awaitable[None]]
Commit = Callable[[Save, CallRecord, int], Awaitable[None]]
"""How a test commits a call: the real commit, the record, and the number of the call."""


def replace_commit(store: Store, commit: Commit) -> None:
    save = store.calls.commit
    numbers = count(1)

    async def replaced(record: CallRecord, *, large: bool) -> None:
        await commit(save, record, next(numbers))

    store.calls.commit = replaced  # type: ignore[method-assign]


Measure = Callable[..., Any]


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


@pytest.fixture
def measured(store: Store, state_dir: None) -> Measure:
    async def run(
        agent: SmallAgent, *checks: str, commit: Commit | None = None, runs: list[ScenarioRun] | None = None
    ) -> HarnessRow:
        if commit is not None:
            replace_commit(store, commit)
        async with ScenarioRunner(ScriptedEngine(), store, "process") as runner:
            row, played = await measure(runner, agent, agent.install(Path("/")), checks or CHECKS, slow=0.3)
        if runs is not None:
            runs += played
        return row

    return run


def is_good(row: HarnessRow) -> bool:
    return CONFORMANCE.is_good_row(asdict(row))


async def test_correct_agent_passes_every_check(measured: Measure) -> None:
    runs: list[ScenarioRun] = []
    row = await measured(SmallAgent(), runs=runs)
    results = {name: (cell.status, cell.detail) for name, cell in row.checks.items()}
    assert set(results) == set(CHECKS)
    allowed = {"subagent": "n/a", "compaction": "not run"}  # this agent has neither
    assert {name: cell for name, cell in results.items() if cell[0] != allowed.get(name, "ok")} == {}
    assert (row.lost, row.doubled, row.dialect, row.streamed) == (0, 0, "openai_chat", "no")
    assert results["reasoning"][1] == "comes back"
    assert "asked again" in results["retry_429"][1]
    assert "asked again" in results["dropped_stream"][1]
    faults = next(run for run in runs if run.model.scenario.name == "faults")
    assert sum(exchange.cut for exchange in faults.exchanges) == 1
    assert [exchange.complete for exchange in faults.exchanges if exchange.cut] == [False]
    assert is_good(row)


async def test_agent_without_outputs_and_reasoning_fails_the_round_trips(measured: Measure) -> None:
    row = await measured(ForgetfulAgent(), "tool_round_trip", "parallel_calls", "reasoning", "exit_ok")
    assert row.checks["tool_round_trip"].status == "failed"
    assert row.checks["parallel_calls"].detail == "0 of 2 outputs came back: ['', '']"
    assert row.checks["reasoning"].detail == "the harness drops it"
    assert row.checks["exit_ok"].status == "ok"
    assert not is_good(row)


async def test_exit_failed_detects_an_agent_that_exits_with_0(measured: Measure) -> None:
    row = await measured(LyingAgent(), "exit_failed")
    assert row.checks["exit_failed"].status == "failed"
    assert "read as ok" in row.checks["exit_failed"].detail


async def test_long_run_detects_a_rewritten_history(measured: Measure) -> None:
    row = await measured(RewritingAgent(), "long_run")
    assert row.checks["long_run"].status == "failed", row.checks["long_run"]


async def test_counts_an_uncommitted_call_as_lost(measured: Measure) -> None:
    async def commit(save: Save, record: CallRecord, number: int) -> None:
        if number == 2:
            raise StoreError("the disk is full")
        await save(record)

    row = await measured(SmallAgent(), "lost", "recorded_first", commit=commit)
    assert row.lost == 1
    assert row.checks["lost"].status == "failed"
    assert row.checks["recorded_first"].status == "failed"
    assert row.checks["lost"].detail.startswith("1 of ")


async def test_counts_a_call_committed_twice_as_doubled(measured: Measure) -> None:
    async def commit(save: Save, record: CallRecord, number: int) -> None:
        await save(record)
        if number == 2:
            await save(replace(record, call_id=new_id("call"), fingerprint=None))

    row = await measured(SmallAgent(), "doubled", commit=commit)
    assert row.doubled == 1
    assert row.checks["doubled"].status == "failed"


async def test_does_not_count_a_retry_as_doubled(measured: Measure) -> None:
    async def commit(save: Save, record: CallRecord, number: int) -> None:
        await save(record)
        if number == 2:
            twin = replace(record, call_id=new_id("call"), edge="retries", parent_call_id=record.call_id)
            await save(twin)

    row = await measured(SmallAgent(), "doubled", commit=commit)
    assert row.doubled == 0


async def test_evidence_detects_a_call_without_log_probabilities(measured: Measure) -> None:
    async def commit(save: Save, record: CallRecord, number: int) -> None:
        await save(replace(record, status="no_tokens") if number == 1 else record)

    row = await measured(SmallAgent(), "evidence", commit=commit)
    assert row.checks["evidence"].status == "failed"
