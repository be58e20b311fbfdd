"""Run one harness in one prompt mode, and count every sampled token as trained or excluded.

For a call whose prompt differs from the sampled tokens, the row has the position of the first difference, the tokens on
both sides, and the causes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness_adapters.base import HarnessAdapter, HarnessError, Installation
from polar_proxy.conformance.checks import edge_counts
from polar_proxy.conformance.fidelity.answers import SCENARIO, FidelityModel
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.conformance.runner import ScenarioRun, ScenarioRunner
from polar_proxy.conformance.scripted_model import Scenario
from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import Engine
from polar_proxy.sessions import prompt_config
from polar_proxy.traces import BuildResult, build
from polar_proxy.traces.drift import DriftCause, DriftEvent, ToolsChange, base_choice, explain_drift
from polar_proxy.types import CallRecord, ChatRequest, Choice, PromptMode, TokenIds, Trace
from sandboxes import SandboxError

SCORED_TOKENS = 200_000
"""Longer sequences are not scored again."""
_SHOWN_TOKENS = 12
"""Tokens shown before and after a difference."""


@dataclass(frozen=True, slots=True)
class ExplainedDrift:
    """The place where a call's prompt first differs from its base's prompt and answer."""

    call_id: str
    base_call_id: str
    position: int
    """Index in the prompt of the first token that differs."""
    in_answer: int | None
    """The same, counted from the start of the base's answer; None if it is before the answer."""
    before: str
    """Text of the tokens before it, which are the same on both sides."""
    sampled: tuple[str, ...]
    """Texts of the tokens from there on, as they were sampled (or as the base's prompt had them)."""
    rendered: tuple[str, ...]
    """Texts of the tokens from there on, as the engine rendered them."""
    causes: tuple[DriftCause, ...]
    """`retokenised` before others: the first tokens that differ have the same text; later the texts differ too."""


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
    """The adapter's description of a start that did not end well."""
    fault: str | None = None
    """Why the scenario could not be run."""
    calls: int = 0
    bases: int = 0
    """Calls whose messages extend a recorded answer, whatever their tokens."""
    continued: int = 0
    drifted: int = 0
    """Calls whose prompt differs from the sampled tokens unintentionally: each splits a merged trace."""
    causes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Why calls were not continued."""
    edges: dict[str, int] = field(default_factory=dict)
    traces: int = 0
    recorded: int = 0
    """Sampled tokens."""
    trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained, by reason."""
    scored: int = 0
    """Tokens whose log-probabilities were computed again, teacher-forced, in the merged sequence."""
    largest: float | None = None
    """The largest difference between a recorded log-probability and the new one (nats)."""
    differences: list[ExplainedDrift] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def adds_up(self) -> bool:
        return self.recorded == self.trained + sum(self.excluded.values())


async def measure_harness(
    runner: ScenarioRunner,
    adapter: HarnessAdapter,
    installed: Installation,
    mode: PromptMode,
    template: str,
    *,
    scenario: Scenario = SCENARIO,
    score: bool = True,
) -> tuple[FidelityRow, ScenarioRun]:
    """Run `scenario` with one harness and count. A run that is not possible has a `fault`."""
    started = time.monotonic()
    row = FidelityRow(adapter.name, installed.version, mode, template)
    # With its usual window a harness would believe that this small tokenizer's long prompts fill the context.
    profile = replace(profile_of(adapter.name), context_window=runner.engine.info.context_length)
    scenario = scenario if "resume" in adapter.info.features else replace(scenario, second=())
    model = FidelityModel(profile, scenario, 0.0)
    try:
        run = await runner.play(model, adapter, installed)
    except (HarnessError, SandboxError, OSError, TimeoutError) as error:
        run = ScenarioRun(model)
        row.fault = f"{type(error).__name__}: {error}"
    await count_tokens(row, run.calls, runner.engine, score=score)
    row.outcomes = tuple(start.outcome for start in run.starts)
    row.detail = "; ".join(start.detail for start in run.starts if start.outcome != "ok")[:300]
    if not run.calls and row.fault is None:
        row.fault = f"it made no model request: {row.detail}"
    row.seconds = round(time.monotonic() - started, 1)
    return row, run


async def count_tokens(row: FidelityRow, calls: Sequence[CallRecord], engine: Engine, *, score: bool) -> None:
    """Fill the row with the counts of the calls of one session."""
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
    row.trained = sum(int(trace.loss_mask.sum()) for trace in built.traces)


async def _score_longest(row: FidelityRow, traces: Sequence[Trace], engine: Engine) -> None:
    """Score the longest merged sequence again, in one teacher-forced pass."""
    limit = min(SCORED_TOKENS, engine.info.context_length - 1)
    fitting = [trace for trace in traces if len(trace.token_ids) <= limit]
    if not fitting:
        return
    trace = max(fitting, key=lambda trace: int(trace.loss_mask.sum()))
    fresh = np.array(await engine.score(trace.token_ids.tolist()), dtype=np.float32)
    trained = trace.loss_mask[1:].astype(bool)
    row.scored = int(trained.sum())
    row.largest = float(np.abs(trace.logprobs[1:][trained] - fresh[trained]).max())


async def explain(engine: Engine, event: DriftEvent, call: CallRecord, base: CallRecord) -> ExplainedDrift:
    """Explain a drifted call and its base. `engine` only decodes tokens."""
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
