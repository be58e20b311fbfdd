"""Measure how many sampled tokens of a harness can be trained, and how its prompts differ from the sampled tokens.

`measure_fidelity` runs every harness with the prescribed answers of `awkward_answers.py`. `measure_drift` runs one
harness, usually with the model's own answers, and stops it after a given number of model calls.

The results of a run are one `FidelityRow`, which counts every sampled token as trained or excluded. The base of a call
is the earlier call whose answer the call's messages extend. For each call whose prompt differs from the tokens of its
base, the row has the first difference, the texts on both sides, and the causes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness_adapters.base import HarnessAdapter, HarnessError, Installation
from polar_proxy.config import EngineSettings
from polar_proxy.conformance.awkward_answers import SCENARIO, FidelityModel
from polar_proxy.conformance.checks import edge_counts
from polar_proxy.conformance.forced_vllm import CUT_EVERY, prescribed_engine
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.conformance.report import FIDELITY
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner, choose_kind, temporary_store
from polar_proxy.conformance.scripted_model import Scenario
from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import Engine
from polar_proxy.sessions.continuation import prompt_config
from polar_proxy.store import Store
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.drift import DriftCause, DriftEvent, ToolsChange, base_choice, explain_drift
from polar_proxy.types import CallRecord, ChatRequest, Choice, EngineInfo, Json, PromptMode, TokenIds, Trace
from sandboxes.base import SandboxKind

MODES: tuple[PromptMode, ...] = ("continue", "render")
TASK = "List the files of this folder with a command, read a.txt, write notes.txt about it, and say when it is done."
SECOND_TASK = "Now run one command that counts the words of notes.txt, and say what it printed."
DRIFT = Scenario("drift", "some turns", ("finish",), second=("finish",))
"""A scenario with two turns of the user, for an engine that samples its own answers. Such an engine ignores the
scenario's steps, which prescribe answers."""
SCORED_TOKENS = 200_000
"""Maximum length, in tokens, of a sequence whose log-probabilities are computed again."""
_SHOWN_TOKENS = 12
"""Number of tokens that are shown before, and after, a difference."""


@dataclass(frozen=True, slots=True)
class ExplainedDrift:
    """The place where a call's prompt first differs from its base's prompt and answer."""

    call_id: str
    base_call_id: str
    position: int
    """Index in the prompt of the first token that differs."""
    in_answer: int | None
    """`position` counted from the start of the base's answer; None if it is before the answer."""
    before: str
    """Text of the tokens before `position`, which are the same on both sides."""
    sampled: tuple[str, ...]
    """Texts of the tokens from `position` on, as they were sampled (or as the base's prompt had them)."""
    rendered: tuple[str, ...]
    """Texts of the tokens from `position` on, as the engine rendered them."""
    causes: tuple[DriftCause, ...]
    """Why the prompt differs. `retokenised`: other tokens for the same text. Causes after it explain the later places
    where the text differs too."""


@dataclass(slots=True)
class FidelityRow:
    """Counts for one harness in one prompt mode."""

    harness: str
    version: str
    mode: PromptMode
    template: str
    dialect: str = "-"
    outcomes: tuple[str, ...] = ()
    """How each start of the program ended."""
    detail: str = ""
    """The adapter's description of a failed start."""
    fault: str | None = None
    """Why the scenario could not be run, or that the harness made no model request."""
    calls: int = 0
    bases: int = 0
    """Number of calls that have a base. The messages of such a call continue the base's conversation, but the tokens
    may differ."""
    continued: int = 0
    drifted: int = 0
    """Number of calls whose prompt unintentionally differs from the sampled tokens. Each such call that is trained
    begins another trace."""
    causes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of calls whose prompt does not continue recorded tokens, by reason."""
    edges: dict[str, int] = field(default_factory=dict)
    traces: int = 0
    recorded: int = 0
    """Number of sampled tokens."""
    trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """Number of sampled tokens that are not trained, by reason."""
    scored: int = 0
    """Number of tokens that a teacher-forced pass scored again: the trained tokens of one trace."""
    largest: float | None = None
    """The largest difference between a recorded log-probability and the new one (nats)."""
    differences: list[ExplainedDrift] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def adds_up(self) -> bool:
        return self.recorded == self.trained + sum(self.excluded.values())

    def to_json(self) -> Json:
        return {**asdict(self), "adds_up": self.adds_up}


@dataclass(frozen=True, slots=True)
class FidelityJob:
    adapter: HarnessAdapter
    installed: Installation
    template: str
    mode: PromptMode


async def measure_fidelity(
    adapters: Sequence[tuple[HarnessAdapter, str | None]],
    engine: EngineSettings,
    sandbox: str,
    templates: Sequence[str],
    *,
    cache: Path,
    concurrency: int,
    patience: float,
    progress: Callable[[str], None],
) -> AsyncGenerator[Json, None]:
    """Measure every harness (and version) with every template in both prompt modes.

    Yield a document for each combination. A harness that cannot be installed is left out.
    """
    kind = await choose_kind(sandbox)
    jobs = []
    for adapter, version in adapters:
        try:
            installed = await asyncio.to_thread(adapter.install, cache, version)
        except HarnessError as error:
            progress(f"{adapter.name}: not run: {str(error)[:300]}")
            continue
        jobs += [FidelityJob(adapter, installed, template, mode) for template in templates for mode in MODES]
    played = play(
        jobs,
        lambda template: prescribed_engine(engine, template),
        kind,
        concurrency=concurrency,
        patience=patience,
        progress=progress,
    )
    async with aclosing(played):
        async for row, info in played:
            counts = f"{row.calls} calls, {row.drifted} splits by drift, {row.traces} traces, {row.seconds:.0f} s"
            progress(f"{row.harness}, {row.template}, {row.mode}: {row.fault or counts}")
            cut_every = CUT_EVERY if engine.kind == "vllm" else 0
            yield FIDELITY.document([row.to_json()], engine=info, sandbox=kind, cut_every=cut_every)


async def play(
    jobs: Sequence[FidelityJob],
    make_engine: Callable[[str], Engine],
    sandbox: SandboxKind,
    *,
    concurrency: int = 1,
    patience: float = 1.0,
    score: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> AsyncGenerator[tuple[FidelityRow, EngineInfo], None]:
    """Run every job (a harness with a template and a prompt mode) once, each with its own engine.

    `make_engine(template)` makes the engine. Yields the row of a job and its engine's info when the job ends.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(store: Store, job: FidelityJob) -> tuple[FidelityRow, EngineInfo]:
        async with slots:
            progress(f"{job.adapter.name}, {job.template}, {job.mode}")
            engine = make_engine(job.template)
            async with ScenarioRunner(engine, store, sandbox, patience=patience, prompt_mode=job.mode) as runner:
                row, _ = await play_job(runner, job, score=score)
                return row, engine.info

    async with temporary_store() as store:
        tasks = [asyncio.create_task(run(store, job)) for job in jobs]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def play_job(runner: ScenarioRunner, job: FidelityJob, *, score: bool = True) -> tuple[FidelityRow, ScenarioRun]:
    """Give a harness the awkward answers, and count the tokens.

    If the harness cannot be run, the returned row and run say why in their field `fault`.
    """
    started = time.monotonic()
    row = FidelityRow(job.adapter.name, job.installed.version, job.mode, job.template)
    run = await runner.play(_model(runner.engine, job.adapter), job.adapter, job.installed)
    await count_tokens(row, run.calls, runner.engine, score=score)
    row.outcomes = tuple(start.outcome for start in run.starts)
    row.detail = "; ".join(start.detail for start in run.starts if start.outcome != "ok")[:300]
    row.fault = run.fault
    if not run.calls and run.fault is None:
        row.fault = f"it made no model request: {row.detail}"
    row.seconds = round(time.monotonic() - started, 1)
    return row, run


def _model(
    engine: Engine, adapter: HarnessAdapter, scenario: Scenario = SCENARIO, *, max_steps: int | None = None
) -> FidelityModel:
    """Return the scripted model of a harness. If the harness cannot resume a session, leave out the second turn."""
    profile = profile_of(adapter)
    # With its usual window a harness would believe that this small tokenizer's long prompts fill the context.
    window = engine.info.context_length
    profile = replace(profile, context_window=window, max_steps=max_steps or profile.max_steps)
    if "resume" not in adapter.info.features:
        scenario = replace(scenario, second=())
    return FidelityModel(profile, scenario, 0.0)


async def measure_drift(
    engine: Engine,
    adapter: HarnessAdapter,
    installed: Installation,
    sandbox: str,
    *,
    turns: int,
    task: str | None,
    awkward: bool,
    seconds: float,
) -> FidelityRow:
    """Let a harness make up to `turns` model calls in render mode, stop it, and count how its prompts drifted.

    With `awkward` the engine gives the answers of `awkward_answers.py` instead of its own.
    """
    kind = await choose_kind(sandbox)
    recorded: list[CallRecord] = []
    enough = asyncio.Event()

    def on_call(record: CallRecord) -> None:
        recorded.append(record)
        if len(recorded) >= turns:
            enough.set()

    async with temporary_store() as store, ScenarioRunner(engine, store, kind, prompt_mode="render") as runner:
        model = _model(engine, adapter, SCENARIO if awkward else replace(DRIFT, seconds=seconds), max_steps=turns)
        if not awkward:
            model.instructions = (task or TASK, SECOND_TASK)
        runner.gateway.observe(on_call)
        run = await _run_until(enough, runner.play(model, adapter, installed))
        calls = await store.calls.of_session(recorded[0].session_id) if recorded else ()
        row = FidelityRow(adapter.name, installed.version, "render", "-")
        row.outcomes = ("stopped",) if run is None else tuple(start.outcome for start in run.starts)
        if not calls and run is not None:
            row.fault = run.fault or f"it made no model request: {run.last.detail[:300]}"
        await count_tokens(row, calls[:turns], engine, score=False)
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


async def count_tokens(row: FidelityRow, calls: Sequence[CallRecord], engine: Engine, *, score: bool) -> None:
    """Count calls, traces, drift and tokens of one session, and write the numbers to `row`.

    With `score`, also let the engine score one trace again (`_score_longest`).
    """
    by_id = {call.call_id: call for call in calls}
    built = build(calls)
    row.dialect = ", ".join(sorted({call.dialect for call in calls})) or "-"
    row.calls, row.traces = len(calls), len(built.traces)
    row.bases = sum(call.base_call_id is not None for call in calls)
    row.continued = sum(call.prompt_mode == "continue" for call in calls)
    row.reasons = dict(Counter(call.prompt_reason for call in calls if call.prompt_reason).most_common())
    row.edges = dict(edge_counts(calls).most_common())
    causes: Counter[str] = Counter()
    for event in built.drift_events:
        row.drifted += 1
        difference = await explain(engine, event, by_id[event.call_id], by_id[event.base_call_id])
        row.differences.append(difference)
        causes[" + ".join(difference.causes)] += 1
    row.causes = dict(causes.most_common())
    _count_trained(row, calls, built)
    if score:
        await _score_longest(row, built.traces, engine)


def _count_trained(row: FidelityRow, calls: Sequence[CallRecord], built: BuildResult) -> None:
    excluded: Counter[str] = Counter()
    for call in calls:
        sampled = sum(len(choice.token_ids) for choice in call.choices)
        row.recorded += sampled
        if call.call_id in built.excluded:
            excluded[built.excluded[call.call_id]] += sampled
    row.excluded = dict(excluded.most_common())
    row.trained = sum(trace.trained_tokens for trace in built.traces)


async def _score_longest(row: FidelityRow, traces: Sequence[Trace], engine: Engine) -> None:
    """Let the engine score one trace again in one teacher-forced pass.

    The trace is the one with the most trained tokens among the traces that fit into the engine's context and have at
    most `SCORED_TOKENS` tokens.
    """
    limit = min(SCORED_TOKENS, engine.info.context_length - 1)
    fitting = [trace for trace in traces if len(trace.token_ids) <= limit]
    if not fitting:
        return
    trace = max(fitting, key=lambda trace: trace.trained_tokens)
    fresh = np.array(await engine.score(trace.token_ids.tolist()), dtype=np.float32)
    trained = trace.loss_mask[1:].astype(bool)
    row.scored = int(trained.sum())
    row.largest = float(np.abs(trace.logprobs[1:][trained] - fresh[trained]).max())


async def explain(engine: Engine, event: DriftEvent, call: CallRecord, base: CallRecord) -> ExplainedDrift:
    """Explain where and why a call's prompt differs from its base's prompt and answer. `engine` only decodes tokens."""
    choice = base_choice(call, base)
    assert choice is not None, event
    assert base.prompt_ids is not None, event
    assert call.prompt_ids is not None, event
    expected = np.concatenate([base.prompt_ids, choice.token_ids])
    position = event.position
    start = len(base.prompt_ids)
    context, answer = await _text(engine, base.prompt_ids), await _text(engine, choice.token_ids)
    prompt = await _text(engine, call.prompt_ids)
    sampled, rendered = await _texts(engine, expected[position:]), await _texts(engine, call.prompt_ids[position:])
    causes = explain_drift(context, answer, prompt, reasoning=_reasoning(base, choice), tools=_tools(base, call))
    return ExplainedDrift(
        call.call_id,
        base.call_id,
        position,
        position - start if position >= start else None,
        await _text(engine, expected[max(position - _SHOWN_TOKENS, 0) : position]),
        sampled,
        rendered,
        _add_retokenised(sampled, rendered, causes),
    )


def _add_retokenised(
    sampled: tuple[str, ...], rendered: tuple[str, ...], causes: tuple[DriftCause, ...]
) -> tuple[DriftCause, ...]:
    """Put `retokenised` before the causes if the first tokens that differ have the same text."""
    if causes == ("retokenised",) or not sampled or not rendered:
        return causes
    size = max(len(sampled[0]), len(rendered[0]))
    same = "".join(sampled)[:size] == "".join(rendered)[:size]
    return ("retokenised", *causes) if same else causes


def _tools(base: CallRecord, call: CallRecord) -> ToolsChange:
    if base.tools == call.tools:
        return "same"
    requests = [recorded_request(one) for one in (base, call)]
    tools = {prompt_config(request)[0] for request in requests if isinstance(request, ChatRequest)}
    return "changed" if len(tools) > 1 else "rewritten"


def _reasoning(base: CallRecord, choice: Choice) -> list[str]:
    request = recorded_request(base)
    earlier = [message.reasoning for message in request.messages] if isinstance(request, ChatRequest) else []
    return [text for text in (*earlier, choice.message.reasoning) if isinstance(text, str)]


async def _text(engine: Engine, ids: TokenIds) -> str:
    return await engine.decode(ids.tolist()) if ids.size else ""


async def _texts(engine: Engine, ids: TokenIds) -> tuple[str, ...]:
    return tuple([await engine.decode([token]) for token in ids[:_SHOWN_TOKENS].tolist()])
