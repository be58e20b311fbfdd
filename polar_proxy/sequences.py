"""The token sequence of a trace: assembled from its calls, joined with its parent traces, compared and checked.

`find_problem` is the one check that a trace matches its calls: builders and the store call it. Its first part,
`find_layout_problem`, needs no calls, so that readers of exported rows can use it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from polar_proxy.types import AnswerSampling, CallRecord, Choice, Json, Logprobs, Span, TokenIds, Trace

_MISSING_LOGPROB = -9000.0
"""Engines write -9999 for a missing log-probability, so values at or below this count as missing."""

_OFF_AT_ZERO = frozenset({"top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias"})
_OFF_AT_ONE = frozenset({"top_p", "repetition_penalty"})

LossMask = npt.NDArray[np.uint8]
_COMPARE_AT_ONCE = 256


# ---------------------------------------------------------------- putting sequences together


class SpanError(ValueError):
    """A span names a call or tokens that do not exist."""


def assemble(spans: Sequence[Span], calls: Mapping[str, CallRecord]) -> tuple[TokenIds, LossMask, Logprobs]:
    """Concatenate the tokens of the spans.

    Return token_ids int32 [n], loss_mask uint8 [n], logprobs float32 [n] (NaN where the mask is 0). Raise SpanError
    if a span names a call, an answer or tokens that do not exist.
    """
    ids: list[TokenIds] = [np.empty(0, np.int32)]
    reported: list[tuple[int, Logprobs]] = []
    size = 0
    for span in spans:
        call = calls.get(span.call_id)
        if call is None:
            raise SpanError(f"a span names the call {span.call_id}, which the session does not have")
        tokens, values = call.prompt_ids, None
        if span.kind == "sampled":
            choice = find_choice(call, span.choice)
            if choice is None:
                raise SpanError(f"the call {span.call_id} has no choice {span.choice}")
            tokens, values = choice.token_ids, choice.logprobs
        if tokens is None or not 0 <= span.start <= span.end <= len(tokens):
            raise SpanError(f"a span lies outside of the call {span.call_id}")
        ids.append(tokens[span.start : span.end])
        if values is not None:
            reported.append((size, values[span.start : span.end]))
        size += span.end - span.start
    logprobs = np.full(size, np.nan, np.float32)
    for start, values in reported:
        logprobs[start : start + len(values)] = values
    return np.concatenate(ids), _mask_of(spans), logprobs


def _mask_of(spans: Sequence[Span]) -> LossMask:
    sampled = np.array([span.kind == "sampled" for span in spans], np.uint8)
    return np.repeat(sampled, [span.end - span.start for span in spans])


# ---------------------------------------------------------------- how answers were sampled


def answer_sampling(call: CallRecord, choice: Choice) -> AnswerSampling:
    """Return how one answer of a call was sampled."""
    sampling = call.sampling
    changes: Json = {}
    for name, value in sampling.items():
        if (name in _OFF_AT_ZERO and value) or (name in _OFF_AT_ONE and value not in (None, 1.0)):
            changes[name] = value
    return AnswerSampling(sampling.get("temperature"), changes, call.logprob_mode, policy_versions(call, choice))


def policy_versions(call: CallRecord, choice: Choice) -> tuple[tuple[int, str | None], ...]:
    """Return which policy version sampled which tokens of an answer, as pairs (start, policy version).

    A version sampled the tokens from its `start` in the answer up to the next `start`. The first `start` is 0.
    """
    if not choice.versions:
        return ((0, call.weight_version),)
    if choice.versions[0][0] > 0:
        return ((0, call.weight_version), *choice.versions)
    return choice.versions


def samplings_of(spans: Iterable[Span], calls: Mapping[str, CallRecord]) -> tuple[AnswerSampling, ...]:
    """Return how the answers in the sampled spans were sampled, one entry for each span."""
    return tuple(answer_sampling(call, choice) for _, call, choice in _sampled_answers(spans, calls))


def _sampled_answers(
    spans: Iterable[Span], calls: Mapping[str, CallRecord]
) -> Iterator[tuple[Span, CallRecord, Choice]]:
    """Yield each sampled span that names an answer, with its call and this answer."""
    for span in spans:
        if span.kind == "sampled":
            call = calls[span.call_id]
            choice = find_choice(call, span.choice)
            if choice is not None:
                yield span, call, choice


def find_choice(call: CallRecord, index: int) -> Choice | None:
    """Return the answer with this index of a call; None if the call has no such answer."""
    for choice in call.choices:
        if choice.index == index:
            return choice
    return None


@dataclass(frozen=True, slots=True)
class TracePath:
    """All tokens from the root trace to the end of a trace. The trace's own tokens begin at its `branch_at`."""

    token_ids: TokenIds
    """int32 [n]."""
    loss_mask: LossMask
    """uint8 [n]."""
    logprobs: Logprobs
    """float32 [n], NaN where the mask is 0."""


def trace_path(trace: Trace, traces: Iterable[Trace] | Mapping[str, Trace]) -> TracePath:
    """Return all tokens from the root to the end of a trace.

    `traces` are all traces of its build, including its ancestors. Raise ValueError if an ancestor is missing, or if a
    trace branches at a position outside of its parent's tokens.
    """
    by_id = traces if isinstance(traces, Mapping) else {one.trace_id: one for one in traces}
    pieces = [(trace, len(trace.token_ids))]
    here = trace
    while here.parent_trace_id is not None:
        parent = by_id.get(here.parent_trace_id)
        if parent is None:
            raise ValueError(f"The parent {here.parent_trace_id} of the trace {here.trace_id} is missing")
        shared = here.branch_at - parent.branch_at
        if not 0 < shared <= len(parent.token_ids):
            raise ValueError(
                f"The trace {here.trace_id} cannot branch from {parent.trace_id} at position {here.branch_at}, because "
                f"{parent.trace_id} has no such position"
            )
        pieces.append((parent, shared))
        here = parent
    pieces.reverse()
    return TracePath(
        np.concatenate([one.token_ids[:size] for one, size in pieces]),
        np.concatenate([one.loss_mask[:size] for one, size in pieces]),
        np.concatenate([one.logprobs[:size] for one, size in pieces]),
    )


# ---------------------------------------------------------------- checking a trace


def find_layout_problem(trace: Trace) -> str | None:
    """Return how the fields of a trace contradict each other; None if they agree.

    The spans must tile the tokens. Exactly the tokens of sampled spans must have mask 1 and a finite log-probability.
    The prompt must end where the first sampled span begins.
    """
    size = sum(span.end - span.start for span in trace.spans)
    if not size == len(trace.token_ids) == len(trace.loss_mask) == len(trace.logprobs):
        return f"its spans cover {size} tokens, but it has {len(trace.token_ids)}"
    if not all(span.start < span.end for span in trace.spans):
        return "a span is empty"
    mask = _mask_of(trace.spans)
    if not np.array_equal(trace.loss_mask, mask):
        return "its loss mask is not 1 exactly on the sampled spans"
    sampled = mask == 1
    if not (sampled | np.isnan(trace.logprobs)).all():
        return "it has log-probabilities of tokens that were not sampled"
    if not all_reported(trace.logprobs[sampled]):
        return "log-probabilities of sampled tokens are missing or not finite"
    if len(trace.sampling) != sum(span.kind == "sampled" for span in trace.spans):
        return "it does not state for each answer how it was sampled"
    before = int(sampled.argmax()) if sampled.any() else size
    if trace.prompt_length != before:
        return f"its first answer begins at {before}, and its prompt has {trace.prompt_length} tokens"
    return None


def all_reported(logprobs: Logprobs) -> bool:
    """Return whether no log-probability (float32 [n]) is missing: all are finite, and above `_MISSING_LOGPROB`."""
    # A NaN makes both the minimum and the maximum NaN, and fails both comparisons.
    return not len(logprobs) or bool(logprobs.min() > _MISSING_LOGPROB and logprobs.max() < np.inf)


def find_problem(trace: Trace, calls: Mapping[str, CallRecord]) -> str | None:
    """Return how a trace differs from its calls; None if it matches them.

    A trace matches its calls if it has their tokens and log-probabilities, position by position, and each sampled span
    is a whole answer. A rescored trace may have other log-probabilities.
    """
    if (problem := find_layout_problem(trace)) is not None:
        return problem
    try:
        token_ids, mask, logprobs = assemble(trace.spans, calls)
    except SpanError as error:
        return str(error)
    answers = list(_sampled_answers(trace.spans, calls))
    if trace.sampling != tuple(answer_sampling(call, choice) for _, call, choice in answers):
        return "the recorded sampling of its answers (temperature, policy version, ...) differs from that of the calls"
    differs = np.flatnonzero(trace.token_ids != token_ids)
    if differs.size:
        ends = list(accumulate(span.end - span.start for span in trace.spans))
        span = trace.spans[bisect_right(ends, int(differs[0]))]
        return f"its tokens are not those of the call {span.call_id}"
    sampled = mask == 1  # both have NaN elsewhere
    if not trace.rescored and not np.array_equal(trace.logprobs[sampled], logprobs[sampled]):
        return "its log-probabilities are not those recorded at sampling"
    for span, call, choice in answers:
        if (span.start, span.end) != (0, len(choice.token_ids)):
            return f"it has only a part of an answer of the call {call.call_id}"
    if tuple(dict.fromkeys(call.call_id for _, call, _ in answers)) != trace.call_ids:
        return "its call_ids are not the calls whose answers it trains"
    return None


# ---------------------------------------------------------------- comparing token sequences, integers [n]
#
# The store reads the prompts of a session into one buffer, because they begin alike. Two arrays that begin at the same
# address are equal without a comparison, so that a turn costs only the comparison of its new tokens.


def common_prefix_length(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> int:
    size = min(len(one), len(other))
    if size == 0 or _same_short(one[:size], other[:size]) or share_buffer(one, other):
        return size
    start, step = 0, _COMPARE_AT_ONCE
    while start < size:  # in growing steps, because most sequences that differ have an early difference
        end = min(start + step, size)
        differs = one[start:end] != other[start:end]
        position = int(differs.argmax())
        if differs[position]:
            return start + position
        start, step = end, step * 8
    return size


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the index at which two texts or two lists first differ: the length of their common prefix. For arrays, use
    `common_prefix_length`."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def begins_with(whole: TokenIds, start: TokenIds) -> bool:
    size = len(start)
    if size == 0:
        return True
    if size > len(whole) or whole[size - 1] != start[-1]:
        return False
    if size <= _COMPARE_AT_ONCE:
        return _same_short(whole[:size], start)
    if share_buffer(whole, start):
        return True
    # The end is compared first, because similar histories usually differ there.
    near = max(0, size - _COMPARE_AT_ONCE)
    return bool((whole[near:size] == start[near:]).all()) and common_prefix_length(whole[:near], start[:near]) == near


def share_buffer(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> bool:
    """Return whether two arrays begin at the same address of one buffer, so that one is a prefix of the other."""
    return one.strides == other.strides and np.may_share_memory(one[:1], other[:1])


def shared_length(ids: TokenIds, known: TokenIds | None) -> int:
    """Return the length of `known` if `known` is the beginning of `ids` in the same memory; otherwise 0.

    If the result is 0, the caller must compare the tokens, because `ids` may begin with a copy of `known`.
    """
    return len(known) if known is not None and len(known) <= len(ids) and share_buffer(ids, known) else 0


def is_any(ids: TokenIds, wanted: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return bool [n]: whether each of `ids` is one of the few ids in `wanted`."""
    found = np.zeros(len(ids), dtype=np.bool_)
    for token in wanted:
        found |= ids == token
    return found


def _same_short(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> bool:
    """Return whether two sequences of equal length are short and equal.

    Short sequences are compared as bytes, which is several times faster than a comparison of the arrays.
    """
    return len(one) <= _COMPARE_AT_ONCE and one.tobytes() == other.tobytes()
