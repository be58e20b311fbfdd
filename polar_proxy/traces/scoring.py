"""Scoring: the log-probabilities that an engine gives to any sequences, including those that it did not sample.

`rescore` is for traces to which drifted calls were joined. `rescore_calls` and `build_rescored` make off-policy traces
of answers that were recorded as text. Promises for these answers, each with a test:

* The tokens of an answer are those that the engine's own template writes after the generation prompt, up to and
  including the end-of-turn token (without this token if the answer was cut). An answer is left out with a reason if the
  template cannot render it in this way, or if the rendering does not contain all of its text.
* The engine that scores did not sample the text. Every trace is of the builder `rescored`, graded `approximate`, and
  names the engine that scored it and the engine that wrote the text. No other builder sees these tokens.

Reasons for which an answer is left out: `sampled_here` (the call has recorded tokens), `raw_prompt`, `images`,
`constrained`, `unreadable` (the stored request cannot be read), `template_refuses`, `prompt_not_kept` (the rendered
conversation with the answer does not begin with the prompt), `no_end_of_turn`, `answer_not_kept` (the template drops or
changes the text), `cut_call` (the answer was cut and has tool calls), `empty`, `unfinished` (ended by a filter, for
example), `beyond_context`, `no_logprobs`; and the reasons for which every builder excludes calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt

from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError, UsageError
from polar_proxy.sequences import all_reported, begins_with
from polar_proxy.store.repositories.rescores import RESCORED_BUILDER, Rescore, apply_rescores
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.certificate import ScorerIdentity
from polar_proxy.traces.grades import SUMMARISING_ENGINES, exclusion_reason, grade_of
from polar_proxy.traces.validation import count_calls
from polar_proxy.types import CallRecord, ChatRequest, Choice, Json, Logprobs, Message, TokenIds, Trace

_FINISHED = {"stop", "tool_calls", "function_call", "length"}


# ---------------------------------------------------------------- sequences


class Scorer:
    """Scores sequences with an engine, at most `at_once` at a time, and counts the tokens that the engine scored."""

    def __init__(self, engine: Engine, at_once: int = 4) -> None:
        """Raise UsageError if the engine cannot score."""
        if "score" not in engine.info.capabilities:
            name = engine.info.engine
            raise UsageError(
                f"The engine {name} cannot compute log-probabilities of given tokens: use vllm, llamacpp or local."
            )
        self.engine = engine
        self.tokens = 0
        self._gate = asyncio.Semaphore(at_once)

    async def score_all(self, sequences: Sequence[TokenIds], temperature: float = 1.0) -> list[npt.NDArray[np.float64]]:
        """Return `score_sequence` of each sequence (int32 [n]).

        A sequence that is the beginning of a longer one gets the values of the longer one: the causal mask makes them
        equal.
        """
        containing = find_containing(sequences)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    index: group.create_task(self._score(sequences[index], temperature))
                    for index in sorted(set(containing))
                }
        except ExceptionGroup as failed:  # the first error is enough: the other tasks were cancelled or failed alike
            raise failed.exceptions[0] from failed
        return [tasks[index].result()[: len(ids)] for ids, index in zip(sequences, containing, strict=True)]

    async def _score(self, ids: TokenIds, temperature: float) -> npt.NDArray[np.float64]:
        async with self._gate:
            values = await score_sequence(self.engine, ids, temperature)
        self.tokens += len(ids)
        return values


async def score_sequence(engine: Engine, ids: TokenIds, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Return the log-probability of each token given all tokens before it, float64 [n].

    The value is NaN for the first token, for tokens after the end of the engine's context, and where the engine gave
    none.
    """
    out = np.full(len(ids), np.nan)
    if len(ids) < 2:
        return out
    taken = ids
    try:
        values = await engine.score(taken.tolist(), temperature)
    except RequestError as error:
        limit = engine.info.context_length
        if error.code != "context_length_exceeded" or not 2 < limit <= len(ids):
            raise
        taken = ids[: limit - 1]
        values = await engine.score(taken.tolist(), temperature)
    out[1 : len(taken)] = values
    return out


def find_containing(sequences: Sequence[TokenIds]) -> list[int]:
    """Return, for each sequence (int32 [n]), the index of the longest sequence that begins with its tokens. If no other
    sequence does, the sequence's own index is returned."""
    by_length = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    containing = list(range(len(sequences)))
    longest: list[int] = []
    for index in by_length:
        found = next((other for other in longest if begins_with(sequences[other], sequences[index])), None)
        if found is None:
            longest.append(index)
        else:
            containing[index] = found
    return containing


# ---------------------------------------------------------------- drift that was joined


async def rescore(build: BuildResult, engine: Engine) -> BuildResult:
    """Rescore the traces to which drifted calls were joined (`on_drift = rescore`), and return the changed build.

    The engine computes teacher-forced log-probabilities of the sampled tokens (raw, given the trace's own tokens). The
    computed values replace the recorded ones, and the trace's grade gets the reason `rescored`. Other traces stay as
    they are. Raise EngineError if the engine gives no value for a sampled token; errors of `engine.score` pass through.
    """
    traces: list[Trace] = []
    reasons = dict(build.grade_reasons)
    for trace in build.traces:
        if "canonical" in reasons[trace.trace_id]:
            reasons[trace.trace_id] = _and_rescored(reasons[trace.trace_id])
            logprobs = await _rescored_logprobs(trace, engine)
            trace = replace(trace, logprobs=logprobs, rescored=True, grade=grade_of(reasons[trace.trace_id]))
        traces.append(trace)
    if not any(trace.rescored for trace in traces):
        return build
    scorer = ScorerIdentity.of(engine.info, await engine.weight_version())
    return replace(build, traces=tuple(traces), grade_reasons=reasons, rescored_by=scorer)


async def _rescored_logprobs(trace: Trace, engine: Engine) -> Logprobs:
    values = await engine.score(trace.token_ids.tolist())
    if len(values) != len(trace.token_ids) - 1:
        raise EngineError(f"The engine scored {len(values)} of {len(trace.token_ids) - 1} tokens.")
    # The first token has nothing before it; a joined trace begins with context.
    logprobs: Logprobs = np.array([np.nan, *values], dtype=np.float32)
    logprobs[trace.loss_mask == 0] = np.nan
    if not all_reported(logprobs[trace.loss_mask == 1]):
        raise EngineError(f"The engine gave no log-probability for some sampled tokens of {trace.trace_id}.")
    return logprobs


# ---------------------------------------------------------------- answers that were recorded as text


class UnusableAnswerError(Exception):
    """An answer that cannot be written in the engine's tokens. The error's text is the reason."""


@dataclass(slots=True)
class RescoreReport:
    """Counts of a rescoring. `skipped`: calls by reason."""

    sessions: int = 0
    calls: int = 0
    answers: int = 0
    tokens: int = 0
    traces: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    scored_tokens: int = 0

    def add(self, calls: int, rescores: Sequence[Rescore], skipped: Mapping[str, str], traces: int) -> None:
        """Add the counts of one session. `skipped`: call id -> reason."""
        self.sessions += 1
        self.calls += calls - len(skipped)
        self.answers += len(rescores)
        self.tokens += sum(len(rescore.token_ids) for rescore in rescores)
        self.traces += traces
        self.skipped.update(skipped.values())

    def to_json(self) -> Json:
        return {**asdict(self), "skipped": dict(self.skipped)}


def require_end_of_turn(engine: Engine) -> None:
    if not engine.info.eos_token_ids:
        name = engine.info.engine
        raise UsageError(f"The engine {name} does not report its end-of-turn token: the end of an answer is unknown.")


async def rescore_calls(calls: Sequence[CallRecord], scorer: Scorer) -> tuple[list[Rescore], dict[str, str]]:
    """Encode and score a session's answers that were recorded without tokens.

    Return the rescores, and call id -> reason for the calls that are skipped. If one answer of a call fails, the whole
    call is skipped.
    """
    engine = scorer.engine
    skipped: dict[str, str] = {}
    answers: list[tuple[CallRecord, Choice, TokenIds, TokenIds]] = []
    for call in calls:
        try:
            answers += [(call, *encoded) for encoded in await encode_answers(call, engine)]
        except UnusableAnswerError as reason:
            skipped[call.call_id] = str(reason)
    sequences = [np.concatenate([prompt, answer]) for _, _, prompt, answer in answers]
    scores = await scorer.score_all(sequences)
    version = await engine.weight_version()
    rescores: list[Rescore] = []
    for (call, choice, prompt, answer), values in zip(answers, scores, strict=True):
        logprobs = values[len(prompt) :].astype(np.float32)
        if not all_reported(logprobs):
            beyond = len(prompt) + len(answer) >= engine.info.context_length
            skipped[call.call_id] = "beyond_context" if beyond else "no_logprobs"
            continue
        rescores.append(Rescore(call.call_id, choice.index, engine.info, version, prompt, answer, logprobs))
    return [rescore for rescore in rescores if rescore.call_id not in skipped], skipped


def build_rescored(
    calls: Sequence[CallRecord],
    rescores: Sequence[Rescore],
    *,
    skipped: Mapping[str, str] | None = None,
    rollout_id: str | None = None,
    reward: float | None = None,
) -> BuildResult:
    """Build merged traces from the calls to which `rescores` adds tokens, and exclude all other calls. Pure.

    `skipped`: id of a call that was not rescored -> reason. An excluded call without an entry gets a general reason."""
    rescored = {rescore.call_id for rescore in rescores}
    pairs = zip(apply_rescores(calls, rescores), calls, strict=True)
    with_tokens = [call for call, before in pairs if call is not before]
    left_out = {
        call.call_id: (skipped or {}).get(call.call_id) or _no_rescore_reason(call) or "not_rescored"
        for call in calls
        if call.call_id not in rescored
    }
    built = build(with_tokens, rollout_id=rollout_id, reward=reward)
    summarised = {call.call_id for call in calls if _has_summary(call)}
    reasons = {
        trace.trace_id: _and_rescored(built.grade_reasons[trace.trace_id])
        + (("summarised",) if summarised.intersection(trace.call_ids) else ())
        for trace in built.traces
    }
    result = replace(
        built,
        builder=RESCORED_BUILDER,
        traces=tuple(
            replace(trace, builder=RESCORED_BUILDER, rescored=True, grade=grade_of(reasons[trace.trace_id]))
            for trace in built.traces
        ),
        excluded={**built.excluded, **left_out},
        grade_reasons=reasons,
        rescored_by=ScorerIdentity.of(rescores[0].engine, rescores[0].weight_version) if rescores else None,
    )
    count_calls(calls, result)
    return result


def _and_rescored(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*reasons, "rescored"}))


def _has_summary(call: CallRecord) -> bool:
    """Return whether the reasoning of an answer is a provider's summary."""
    return (
        call.engine is not None
        and call.engine.engine in SUMMARISING_ENGINES
        and any(choice.message.reasoning for choice in call.choices)
    )


def _no_rescore_reason(call: CallRecord) -> str | None:
    """Return why a call is not rescored: it needs no rescoring, or cannot be rescored. None if the call is to be
    rescored."""
    if call.status == exclusion_reason(call) == "no_tokens" and call.edge != "side_call":
        if call.hooks is not None:
            return "hook"
        return None if call.choices else "empty"
    return "side_call" if call.edge == "side_call" else exclusion_reason(call) or "sampled_here"


async def encode_answers(call: CallRecord, engine: Engine) -> list[tuple[Choice, TokenIds, TokenIds]]:
    """Return (answer, token ids of the prompt, token ids of the answer) for each answer of a call; the ids are int32.

    The engine renders the prompt and the answer to these ids. Raises UnusableAnswerError with the reason if the call
    needs no rescoring or cannot be rescored: for example, if a rendered answer lacks a part of the recorded text.
    """
    if (reason := _no_rescore_reason(call)) is not None:
        raise UnusableAnswerError(reason)
    try:
        request = recorded_request(call)
    except RequestError as error:
        raise UnusableAnswerError("unreadable") from error
    if not isinstance(request, ChatRequest):
        raise UnusableAnswerError("raw_prompt")
    if call.sampling.get("constrained"):
        raise UnusableAnswerError("constrained")
    if any(message.has_images for message in request.messages):
        raise UnusableAnswerError("images")
    try:
        prompt = await engine.render(request)
        encoded = [(choice, await _answer_tokens(choice, request, prompt, engine)) for choice in call.choices]
    except RequestError as error:
        beyond = error.code == "context_length_exceeded"
        raise UnusableAnswerError("beyond_context" if beyond else "template_refuses") from error
    ids = np.array(prompt, dtype=np.int32)
    return [(choice, ids, np.array(answer, dtype=np.int32)) for choice, answer in encoded]


async def _answer_tokens(choice: Choice, request: ChatRequest, prompt: list[int], engine: Engine) -> list[int]:
    answer = choice.message
    cut = choice.finish_reason == "length"
    if choice.finish_reason not in _FINISHED:
        raise UnusableAnswerError("unfinished")
    if cut and answer.tool_calls:
        raise UnusableAnswerError("cut_call")
    whole = await engine.render(replace(request, messages=(*request.messages, answer)), generation=False)
    if whole[: len(prompt)] != prompt:
        raise UnusableAnswerError("prompt_not_kept")
    rendered = whole[len(prompt) :]
    end_tokens = engine.info.eos_token_ids
    end = next((position for position, token in enumerate(rendered) if token in end_tokens), None)
    if end is None:
        raise UnusableAnswerError("no_end_of_turn")
    tokens = rendered[: end if cut else end + 1]
    if not tokens or not rendered[:end]:
        raise UnusableAnswerError("empty")
    text = await engine.decode(rendered[:end])
    if not all(piece in text for piece in _required_pieces(answer)):
        raise UnusableAnswerError("answer_not_kept")
    return tokens


def _required_pieces(answer: Message) -> list[str]:
    """Return the texts that a rendering of the answer must contain: reasoning, content and names of called tools.

    The texts are stripped, because templates trim white space. Arguments of tool calls are not among them, because each
    template writes them in its own form.
    """
    content = answer.content if isinstance(answer.content, str) else ""
    return [(answer.reasoning or "").strip(), content.strip(), *(call.name for call in answer.tool_calls)]
