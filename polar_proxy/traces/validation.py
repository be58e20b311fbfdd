"""The books of a build: recorded = trained + excluded, and every trained token stands where it was sampled.

`validate` runs at the end of every builder, so that one which lost, doubled or moved something cannot hand out what it
made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from polar_proxy.traces.canonical import find_context_start
from polar_proxy.traces.drift import drift_events
from polar_proxy.traces.grades import CANONICAL, RESCORED, grade_of
from polar_proxy.traces.paths import trace_path
from polar_proxy.traces.tokens import begins_with, share_buffer
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.types import CallRecord, Json, Logprobs, Span, TokenIds, Trace

_NO_IDS: TokenIds = np.empty(0, np.int32)
_NO_LOGPROBS: Logprobs = np.empty(0, np.float32)


class InvariantError(AssertionError):
    """A builder lost or doubled something. This is a bug in Polar, never in the data."""


def validate(calls: Sequence[CallRecord], built: BuildResult) -> None:
    """Check a build, call by call and token by token. Raises AccountingError.

    * Every call gave all its answers to the traces, each answer whole and to one trace, or is excluded with a reason.
    * Every trace is what its spans say; the mask is 1 exactly on sampled spans, with the log-probabilities recorded
      there (of a rescored trace: finite ones).
    * What stands before an answer is its call's whole prompt. Where drift is joined (`on_drift`), the context before
      the answer may instead begin inside of the prompt, at the one place that `canonical.cut` allows.
    * Every drifted call is among the findings.
    """
    by_id = {call.call_id: call for call in calls}
    traces = {trace.trace_id: trace for trace in built.traces}
    trained: set[tuple[str, int]] = set()
    for trace in built.traces:
        _check_trace(trace, by_id, built)
        _check_prompts(trace, traces, by_id, built)
        for span in trace.spans:
            if span.kind == "sampled":
                key = (span.call_id, span.choice)
                if key in trained:
                    raise InvariantError(f"{built.builder}: choice {key} is trained twice")
                trained.add(key)
    if strange := set(built.excluded) - set(by_id):
        raise InvariantError(f"{built.builder}: calls that were never recorded are excluded: {sorted(strange)}")
    for call in by_id.values():
        given = {choice.index for choice in call.choices if (call.call_id, choice.index) in trained}
        if call.call_id in built.excluded:
            if given:
                raise InvariantError(f"{built.builder}: call {call.call_id} is both trained and excluded")
        elif not given or len(given) != len(call.choices):
            raise InvariantError(f"{built.builder}: call {call.call_id} is neither trained whole nor excluded")
    _check_findings(calls, built)


def count_calls(calls: Sequence[CallRecord], built: BuildResult) -> Json:
    """{"recorded", "trained", "excluded": {reason: n}}, in calls, for tables. Raises AccountingError if they do not
    add up."""
    trained = {call_id for trace in built.traces for call_id in trace.call_ids}
    excluded = Counter(built.excluded.values())
    if len(calls) != len(trained) + excluded.total() or trained & set(built.excluded):
        raise InvariantError(
            f"{built.builder}: {len(calls)} calls were recorded, {len(trained)} trained, {excluded.total()} excluded"
        )
    return {"recorded": len(calls), "trained": len(trained), "excluded": dict(sorted(excluded.items()))}


def _check_trace(trace: Trace, calls: Mapping[str, CallRecord], built: BuildResult) -> None:
    """The trace is what its spans say, position by position, and each sampled span is a whole choice."""
    builder = built.builder
    n = len(trace.token_ids)
    if not n == len(trace.loss_mask) == len(trace.logprobs) == sum(span.end - span.start for span in trace.spans):
        raise InvariantError(f"{builder}: the spans of {trace.trace_id} do not tile its {n} tokens")
    heard: dict[str, None] = {}
    pieces: list[TokenIds] = []
    told: list[Logprobs] = [_NO_LOGPROBS]
    for span in trace.spans:
        call = calls.get(span.call_id)
        if call is None:
            raise InvariantError(f"{builder}: {trace.trace_id} has the call {span.call_id}, which was never recorded")
        source = call.prompt_ids
        if span.kind == "sampled":
            heard[span.call_id] = None
            choice = next((choice for choice in call.choices if choice.index == span.choice), None)
            if choice is None or (span.start, span.end) != (0, len(choice.token_ids)):
                raise InvariantError(f"{builder}: call {call.call_id} is not trained whole in {trace.trace_id}")
            source = choice.token_ids
            told.append(choice.logprobs)
        pieces.append(_NO_IDS if source is None else source[span.start : span.end])
    # All of a trace is compared at once: position by position it is the same, and a turn costs no array of its own.
    sizes = [span.end - span.start for span in trace.spans]
    mask = np.repeat(np.array([span.kind == "sampled" for span in trace.spans], np.uint8), sizes)
    sampled = trace.logprobs[mask == 1]
    same = np.isfinite(sampled).all() if trace.rescored else np.array_equal(sampled, np.concatenate(told))
    if not (same and np.array_equal(trace.loss_mask, mask) and np.isnan(trace.logprobs[mask == 0]).all()):
        raise InvariantError(f"{builder}: mask or log-probabilities of {trace.trace_id} are not those sampled")
    for span, piece, size in zip(trace.spans, pieces, sizes, strict=True):
        if len(piece) != size:
            raise InvariantError(f"{builder}: a span of {trace.trace_id} lies outside of the call {span.call_id}")
    differs = np.flatnonzero(trace.token_ids != np.concatenate([_NO_IDS, *pieces]))
    if differs.size:
        span = trace.spans[bisect_right(list(accumulate(sizes)), int(differs[0]))]
        raise InvariantError(f"{builder}: tokens of {trace.trace_id} are not those of call {span.call_id}")
    if tuple(heard) != trace.call_ids:
        raise InvariantError(f"{builder}: {trace.trace_id} does not name the calls that it trains")
    why = built.why.get(trace.trace_id, ())
    if trace.rescored != (RESCORED in why) or trace.grade != grade_of(why):
        raise InvariantError(f"{builder}: the grade of {trace.trace_id} is not what {why or 'nothing'} makes it")


def _check_prompts(
    trace: Trace, traces: Mapping[str, Trace], calls: Mapping[str, CallRecord], built: BuildResult
) -> None:
    """What stands before each answer is what the model was given, or was joined as `on_drift` allows."""
    try:
        ids = trace.token_ids if trace.parent_trace_id is None else trace_path(trace, traces).token_ids
    except ValueError as error:
        raise InvariantError(f"{built.builder}: {error}") from error
    if len(ids) != trace.branch_at + len(trace.token_ids):
        raise InvariantError(f"{built.builder}: {trace.trace_id} does not begin behind {trace.branch_at} tokens")
    known: TokenIds = ids[:0]
    position = trace.branch_at
    first = True
    for number, span in enumerate(trace.spans):
        if span.kind == "sampled":
            prompt = calls[span.call_id].prompt_ids
            assert prompt is not None
            if first and trace.prompt_length != position - trace.branch_at:
                raise InvariantError(f"{built.builder}: the prompt of {trace.trace_id} has another length")
            if len(prompt) == position and _is_start(prompt, ids, known):
                known = prompt
            elif not _joined(trace, number, calls, built):
                raise InvariantError(
                    f"{built.builder}: in {trace.trace_id} the answer of {span.call_id} is not behind its prompt"
                )
            first = False
        position += span.end - span.start


def _is_start(prompt: TokenIds, ids: TokenIds, known: TokenIds) -> bool:
    """Whether `ids` begin with the prompt, given that they begin with `known`."""
    if len(known) and len(prompt) >= len(known) and share_buffer(prompt, known):
        return begins_with(ids[len(known) :], prompt[len(known) :])
    return begins_with(ids, prompt)


def _joined(trace: Trace, number: int, calls: Mapping[str, CallRecord], built: BuildResult) -> bool:
    """Whether the answer in span `number` follows the answer that its call goes on from, with just the context that
    `canonical.cut` gives."""
    if built.on_drift not in ("canonical", "rescore") or CANONICAL not in built.why.get(trace.trace_id, ()):
        return False
    answer = trace.spans[number]
    call = calls[answer.call_id]
    between = trace.spans[number - 1] if number and trace.spans[number - 1].kind == "context" else None
    before: tuple[Span, ...] = trace.spans[: number - (between is not None)]
    base = calls.get(call.base_call_id or "")
    if not before or base is None or before[-1].kind != "sampled":
        return False
    if (before[-1].call_id, before[-1].choice) != (call.base_call_id, call.base_choice or 0):
        return False
    prompt = call.prompt_ids
    assert prompt is not None
    start = len(prompt) if between is None else between.start
    if between is not None and (between.call_id, between.end) != (call.call_id, len(prompt)):
        return False
    size = sum(span.end - span.start for span in before)
    drifted = any(found.call_id == call.call_id for found in built.findings if found.outcome == "canonical")
    return find_context_start(trace.token_ids[:size], before, call, base, drifted=drifted) == start


def _check_findings(calls: Sequence[CallRecord], built: BuildResult) -> None:
    told = {found.call_id: found for found in built.findings}
    if list(told) != [found.call_id for found in drift_events(calls, built.excluded)]:
        raise InvariantError(f"{built.builder}: the findings are not the calls that drifted")
    for found in built.findings:
        if (found.outcome == "excluded") != (found.call_id in built.excluded):
            raise InvariantError(f"{built.builder}: the finding about {found.call_id} does not tell what was done")
