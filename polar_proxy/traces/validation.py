"""The check of a whole build: recorded = trained + excluded, and every trained token is at the position where it was
sampled.

Every builder ends with `validate`, so that a builder that lost, repeated or moved tokens cannot return its result.
`sequences.find_problem` checks a single trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from polar_proxy.sequences import begins_with, find_problem, shared_length, trace_path
from polar_proxy.traces.drift import drift_events, find_context_start
from polar_proxy.traces.grades import grade_of
from polar_proxy.types import CallRecord, Json, Span, TokenIds, Trace

if TYPE_CHECKING:
    from polar_proxy.traces.builders import BuildResult


class InvariantError(AssertionError):
    """A builder lost, repeated or moved tokens. This is a bug in Polar, never a fault of the data."""


def validate(calls: Sequence[CallRecord], build: BuildResult) -> None:
    """Check a builder's result, call by call and token by token. Raise InvariantError if a condition does not hold.

    * An excluded call has a reason, and its answers are in no trace. Each answer of any other call is complete in
      exactly one trace.
    * Each trace matches its calls. Its grade is the best one that its `grade_reasons` allow (`grades.grade_of`).
    * The tokens before an answer are exactly the prompt of its call. Exception: `on_drift` is `canonical` or `rescore`,
      and a drifted call was joined to the trace. Then they are the trace up to the answer that the call continues, and
      the end of the call's own prompt, from the position that `drift.find_context_start` returns.
    * Every drifted call has a drift event, and the event's outcome is `excluded` exactly if the call is excluded.
    """
    by_id = {call.call_id: call for call in calls}
    if (problem := next(_problems(calls, by_id, build), None)) is not None:
        raise InvariantError(f"{build.builder}: {problem}")


def _problems(calls: Sequence[CallRecord], by_id: Mapping[str, CallRecord], build: BuildResult) -> Iterator[str]:
    traces = {trace.trace_id: trace for trace in build.traces}
    for trace in build.traces:
        if (problem := find_problem(trace, by_id)) is not None:
            yield f"the trace {trace.trace_id} does not match its calls: {problem}"
        reasons = build.grade_reasons.get(trace.trace_id, ())
        if trace.rescored != ("rescored" in reasons) or trace.grade != grade_of(reasons):
            yield f"the grade of {trace.trace_id} does not follow from {reasons}"
        yield from _prompt_problems(trace, traces, by_id, build)
    yield from _answer_problems(by_id, build)
    described = [event.call_id for event in build.drift_events]
    if described != [event.call_id for event in drift_events(calls, build.excluded)]:
        yield "the drift events are not the calls that drifted"
    for event in build.drift_events:
        if (event.outcome == "excluded") != (event.call_id in build.excluded):
            yield f"the drift event of {event.call_id} has the wrong outcome"


def count_calls(calls: Sequence[CallRecord], build: BuildResult) -> Json:
    """Return numbers of calls: {"recorded": n, "trained": n, "excluded": {reason: n}}.

    Raise InvariantError if a recorded call is neither trained nor excluded, or is both.
    """
    trained = {call_id for trace in build.traces for call_id in trace.call_ids}
    excluded = Counter(build.excluded.values())
    if len(calls) != len(trained) + excluded.total() or trained & set(build.excluded):
        raise InvariantError(
            f"{build.builder}: each recorded call must be trained or excluded, but of {len(calls)} calls, "
            f"{len(trained)} are trained and {excluded.total()} excluded"
        )
    return {"recorded": len(calls), "trained": len(trained), "excluded": dict(sorted(excluded.items()))}


def _answer_problems(calls: Mapping[str, CallRecord], build: BuildResult) -> Iterator[str]:
    """Yield the problems of answers. Every call must be either excluded or trained. Every answer of a trained call must
    be in exactly one trace. Only recorded calls can be excluded."""
    spans = [span for trace in build.traces for span in trace.spans if span.kind == "sampled"]
    trained = Counter((span.call_id, span.choice) for span in spans)
    for answer, times in trained.items():
        if times > 1:
            yield f"the answer {answer} is trained twice"
    if unknown := set(build.excluded) - set(calls):
        yield f"excluded calls that were never recorded: {sorted(unknown)}"
    for call in calls.values():
        count = sum((call.call_id, choice.index) in trained for choice in call.choices)
        if call.call_id in build.excluded:
            if count:
                yield f"the call {call.call_id} is both trained and excluded"
        elif not count or count != len(call.choices):
            yield f"the call {call.call_id} is neither trained whole nor excluded"


def _prompt_problems(
    trace: Trace, traces: Mapping[str, Trace], calls: Mapping[str, CallRecord], build: BuildResult
) -> Iterator[str]:
    """Yield a problem for each answer whose preceding tokens in the trace are not its recorded prompt.

    These tokens may differ if `on_drift` joined drifted calls to the trace (see `_is_allowed_join`).
    """
    try:
        ids = trace.token_ids if trace.parent_trace_id is None else trace_path(trace, traces).token_ids
    except ValueError as error:
        yield str(error)
        return
    if len(ids) != trace.branch_at + len(trace.token_ids):
        yield f"{trace.trace_id} does not begin after {trace.branch_at} tokens"
        return
    checked: TokenIds | None = None
    position = trace.branch_at
    for number, span in enumerate(trace.spans):
        if span.kind == "sampled":
            prompt = calls[span.call_id].prompt_ids
            assert prompt is not None
            known = shared_length(prompt, checked)
            if len(prompt) == position and begins_with(ids[known:], prompt[known:]):
                checked = prompt
            elif not _is_allowed_join(trace, number, calls, build):
                yield f"in {trace.trace_id} the answer of {span.call_id} does not follow its prompt"
        position += span.end - span.start


def _is_allowed_join(trace: Trace, number: int, calls: Mapping[str, CallRecord], build: BuildResult) -> bool:
    """Return whether the tokens before the answer in span `number` may differ from the call's prompt.

    They may if `on_drift` allows it, the previous answer in the trace is the answer that the call continues, and the
    context between the two answers begins where `find_context_start` says.
    """
    if build.on_drift not in ("canonical", "rescore") or "canonical" not in build.grade_reasons.get(trace.trace_id, ()):
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
    drifted = any(event.call_id == call.call_id and event.outcome == "canonical" for event in build.drift_events)
    return find_context_start(trace.token_ids[:size], before, call, base, drifted=drifted) == start
