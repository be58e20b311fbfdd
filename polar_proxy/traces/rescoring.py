"""Off-policy traces of answers that came without tokens: another engine encodes and scores the recorded text.

Promises, each a test:

* The tokens of an answer are what the engine's own template writes behind the opening of an answer, up to and with the
  end-of-turn token (without it where the answer was cut). An answer whose rendering is not clean, or does not hold all
  that was said, is left out with a reason.
* Nothing here was sampled by the engine that scored it. Every trace is of the builder `rescored`, graded `marked`, and
  names the engine that scored it beside the one that wrote the text. No other builder sees these tokens.

Reasons: `sampled_here` (the call has tokens of its own), `raw_prompt`, `images`, `constrained`, `unreadable` (the
stored request), `template_refuses`, `prompt_not_kept` (rendered with its answer the conversation begins otherwise than
without), `no_end_of_turn`, `answer_not_kept` (the template drops or changes what was said), `cut_call`, `empty`,
`unfinished` (ended by a filter, say), `beyond_context`, `no_logprobs`; and those of every builder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polar_proxy.dialects import recorded_request
from polar_proxy.dialects.openai_chat import parse_message
from polar_proxy.engines.base import Engine
from polar_proxy.errors import RequestError, UsageError
from polar_proxy.store import Store
from polar_proxy.store.rescores import RESCORED_BUILDER, Rescore, apply_rescores
from polar_proxy.traces.builders import merged
from polar_proxy.traces.certificate import certificates, stored
from polar_proxy.traces.exclusions import MISSING_LOGPROB, exclusion_reason
from polar_proxy.traces.grades import RESCORED, grade_of
from polar_proxy.traces.scoring import ScoredTokens, score_all
from polar_proxy.traces.targets import SessionTarget
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.traces.validation import count_calls
from polar_proxy.types import CallRecord, ChatRequest, Choice, Json, Message, TokenIds

_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_FINISHED = {"stop", "tool_calls", "function_call", "length"}


class UnusableAnswerError(Exception):
    """An answer that cannot be told in the engine's tokens; the reason is its text."""


@dataclass(slots=True)
class RescoreReport:
    """What a rescoring made. `skipped`: calls by reason."""

    sessions: int = 0
    calls: int = 0
    answers: int = 0
    tokens: int = 0
    traces: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    scored: ScoredTokens = field(default_factory=ScoredTokens)

    def to_json(self) -> Json:
        return {
            "sessions": self.sessions,
            "calls": self.calls,
            "answers": self.answers,
            "tokens": self.tokens,
            "traces": self.traces,
            "skipped": dict(self.skipped),
            "scored_tokens": self.scored.tokens,
        }


def require_scoring_engine(engine: Engine) -> None:
    """Raises UsageError for an engine that cannot do this."""
    info = engine.info
    if "score" not in info.capabilities:
        raise UsageError(f"The engine {info.engine} gives no log-probabilities of a given text: use vllm or local.")
    if not info.eos_token_ids:
        raise UsageError(f"The engine {info.engine} does not tell its end-of-turn token, so that no answer has an end.")


async def rescore_session(
    store: Store, engine: Engine, target: SessionTarget, report: RescoreReport, *, at_once: int = 4
) -> None:
    """Encode and score what one session was answered without tokens, and build its traces anew."""
    calls = await store.calls.of_session(target.session_id)
    reasons: dict[str, str] = {}
    answers: list[tuple[CallRecord, Choice, TokenIds, TokenIds]] = []
    for call in calls:
        try:
            answers += [(call, *told) for told in await encode_answers(call, engine)]
        except UnusableAnswerError as reason:
            reasons[call.call_id] = str(reason)
    wholes = [np.concatenate([prompt, said]) for _, _, prompt, said in answers]
    fresh = await score_all(wholes, engine, at_once, report.scored)
    version = await engine.weight_version()
    found: list[Rescore] = []
    for (call, choice, prompt, said), values in zip(answers, fresh, strict=True):
        logprobs = values[len(prompt) :].astype(np.float32)
        if not np.all(np.isfinite(logprobs) & (logprobs > MISSING_LOGPROB)):
            beyond = len(prompt) + len(said) >= engine.info.context_length
            reasons[call.call_id] = "beyond_context" if beyond else "no_logprobs"
            continue
        found.append(Rescore(call.call_id, choice.index, engine.info, version, prompt, said, logprobs))
    found = [one for one in found if one.call_id not in reasons]
    if not found and not await store.rescores.of_session(target.session_id):
        _count(report, calls, found, reasons, 0)
        return
    built = build_rescored(calls, found, reasons=reasons, rollout_id=target.rollout_id, reward=target.reward)
    told = {
        trace_id: stored(certificate)
        for trace_id, certificate in certificates(apply_rescores(calls, found), built).items()
    }
    await store.rescores.put(target.session_id, found)
    await store.traces.put(built.traces, built.excluded, RESCORED_BUILDER, target.session_id, target.rollout_id, told)
    _count(report, calls, found, reasons, len(built.traces))


def _count(
    report: RescoreReport,
    calls: Sequence[CallRecord],
    found: Sequence[Rescore],
    reasons: Mapping[str, str],
    traces: int,
) -> None:
    report.sessions += 1
    report.calls += len(calls) - len(reasons)
    report.answers += len(found)
    report.tokens += sum(len(one.token_ids) for one in found)
    report.traces += traces
    report.skipped.update(reasons.values())


def build_rescored(
    calls: Sequence[CallRecord],
    rescores: Sequence[Rescore],
    *,
    reasons: Mapping[str, str] | None = None,
    rollout_id: str | None = None,
    reward: float | None = None,
) -> BuildResult:
    """Merged traces of rescored answers. `reasons`: why others were not rescored, where that is known. Pure."""
    known = {one.call_id for one in rescores}
    with_tokens = [
        call for call, before in zip(apply_rescores(calls, rescores), calls, strict=True) if call is not before
    ]
    left = {
        call.call_id: (reasons or {}).get(call.call_id) or _why_not(call) or "not_rescored"
        for call in calls
        if call.call_id not in known
    }
    built = merged(with_tokens, rollout_id=rollout_id, reward=reward)
    scorer = rescores[0] if rescores else None
    whole = replace(
        built,
        builder=RESCORED_BUILDER,
        traces=tuple(
            replace(
                trace, builder=RESCORED_BUILDER, rescored=True, grade=grade_of([*built.why[trace.trace_id], RESCORED])
            )
            for trace in built.traces
        ),
        excluded={**built.excluded, **left},
        why={trace_id: tuple(sorted({*why, RESCORED})) for trace_id, why in built.why.items()},
        rescored_by=None
        if scorer is None
        else {
            "engine": scorer.engine.engine,
            "version": scorer.engine.version,
            "model": scorer.engine.model,
            "weight_version": scorer.weight_version,
        },
    )
    count_calls(calls, whole)
    return whole


def _why_not(call: CallRecord) -> str | None:
    """Why a call needs no rescoring, or can never have any."""
    if call.status == "no_tokens" and call.edge != "side_call":
        return None if call.choices else "empty"
    return "side_call" if call.edge == "side_call" else exclusion_reason(call) or "sampled_here"


async def encode_answers(call: CallRecord, engine: Engine) -> list[tuple[Choice, TokenIds, TokenIds]]:
    """Each answer of a call with its prompt and its own tokens (int32), in the engine's rendering.

    Raises Unclean with the reason where one of them cannot be told so.
    """
    if (reason := _why_not(call)) is not None:
        raise UnusableAnswerError(reason)
    try:
        request = recorded_request(call)
    except RequestError as error:
        raise UnusableAnswerError("unreadable") from error
    if not isinstance(request, ChatRequest):
        raise UnusableAnswerError("raw_prompt")
    if call.sampling.get("constrained"):
        raise UnusableAnswerError("constrained")
    if any(_has_images(message) for message in request.messages):
        raise UnusableAnswerError("images")
    try:
        prompt = await engine.render(request)
        told = [(choice, await _said(choice, request, prompt, engine)) for choice in call.choices]
    except RequestError as error:
        beyond = error.code == "context_length_exceeded"
        raise UnusableAnswerError("beyond_context" if beyond else "template_refuses") from error
    ids = np.array(prompt, dtype=np.int32)
    return [(choice, ids, np.array(said, dtype=np.int32)) for choice, said in told]


async def _said(choice: Choice, request: ChatRequest, prompt: list[int], engine: Engine) -> list[int]:
    answer = parse_message(choice.message, len(request.messages))
    cut = choice.finish_reason == "length"
    if choice.finish_reason not in _FINISHED:
        raise UnusableAnswerError("unfinished")
    if cut and answer.tool_calls:
        raise UnusableAnswerError("cut_call")
    whole = await engine.render(replace(request, messages=(*request.messages, answer)), generation=False)
    if whole[: len(prompt)] != prompt:
        raise UnusableAnswerError("prompt_not_kept")
    behind = whole[len(prompt) :]
    ends = engine.info.eos_token_ids
    end = next((place for place, token in enumerate(behind) if token in ends), None)
    if end is None:
        raise UnusableAnswerError("no_end_of_turn")
    said = behind[: end if cut else end + 1]
    if not said or not behind[:end]:
        raise UnusableAnswerError("empty")
    text = await engine.decode(behind[:end])
    if not all(piece in text for piece in _pieces(answer)):
        raise UnusableAnswerError("answer_not_kept")
    return said


def _pieces(answer: Message) -> list[str]:
    """What must stand in a rendering of the answer. Templates strip it and write arguments in their own way."""
    content = answer.content if isinstance(answer.content, str) else ""
    return [(answer.reasoning or "").strip(), content.strip(), *(call.name for call in answer.tool_calls)]


def _has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(part.get("type") not in _TEXT_PARTS for part in message.content)
