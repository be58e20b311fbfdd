"""Making certificates, for a new build and again for stored traces.

The store keeps a certificate without the parts that follow from the trace and its calls (spans, engines, hashes),
except for the last hash. `restore` derives them and must get the same last hash, so that a call or trace that was
changed in the database is detected when a row is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar_proxy.errors import PolarError
from polar_proxy.sequences import trace_path
from polar_proxy.traces.builders import BuildResult
from polar_proxy.traces.certificate import SCHEMA, Certificate, EngineIdentity, hash_tokens, seal
from polar_proxy.traces.drift import DriftEvent
from polar_proxy.traces.grades import grade_of, is_off_distribution, policy_versions, sampling_overrides
from polar_proxy.types import CallRecord, Json, Span, Trace


class CertificateError(PolarError):
    """A stored trace does not match its certificate: it, or one of its calls, was changed in the database."""


def certify(calls: Sequence[CallRecord], build: BuildResult) -> dict[str, Certificate]:
    """Return trace id -> certificate for the traces of a build."""
    by_id = {call.call_id: call for call in calls}
    traces = {trace.trace_id: trace for trace in build.traces}
    return {
        trace.trace_id: _certificate(
            trace,
            traces,
            by_id,
            on_drift=build.on_drift,
            reasons=build.grade_reasons[trace.trace_id],
            drift=[event.model_dump() for event in _events_in(trace, by_id, build.drift_events)],
            rescored=build.rescored_by.model_dump() if trace.rescored and build.rescored_by is not None else None,
        )
        for trace in build.traces
    }


def restore(
    stored: Mapping[str, Json | None], traces: Sequence[Trace], calls: Sequence[CallRecord]
) -> dict[str, Certificate]:
    """Return trace id -> certificate for stored traces: all those of one build, with all calls of their session.

    Raise CertificateError if a trace or a call has changed since the build.
    """
    by_id = {call.call_id: call for call in calls}
    by_trace = {trace.trace_id: trace for trace in traces}
    found: dict[str, Certificate] = {}
    for trace in traces:
        kept = stored.get(trace.trace_id)
        whole = None
        if kept is not None:
            whole = _certificate(
                trace,
                by_trace,
                by_id,
                on_drift=kept["on_drift"],
                reasons=kept["grade_reasons"],
                drift=kept["drift"],
                rescored=kept["rescored"],
            )
        if kept is None or whole is None or whole.head != kept["head"]:
            raise CertificateError(
                f"The trace {trace.trace_id} does not match its certificate: it or its calls were changed in the "
                f"database. If that was intended, build it again with `polar build {trace.session_id}`."
            )
        found[trace.trace_id] = whole.model_copy(update={"grade": kept["grade"], "audit": kept["audit"]})
    return found


def _certificate(
    trace: Trace,
    traces: Mapping[str, Trace],
    calls: Mapping[str, CallRecord],
    *,
    on_drift: str | None,
    reasons: Sequence[str],
    drift: Sequence[Json],
    rescored: Json | None,
) -> Certificate:
    engines: list[Json] = []
    spans = [_span(span, calls[span.call_id], engines) for span in trace.spans]
    branch_hash = None
    if trace.parent_trace_id is not None:
        branch_hash = hash_tokens(trace_path(trace, traces).token_ids[: trace.branch_at])
    header: Json = {
        "schema": SCHEMA,
        "trace_id": trace.trace_id,
        "session_id": trace.session_id,
        "rollout_id": trace.rollout_id,
        "builder": trace.builder,
        "on_drift": on_drift,
        "grade_reasons": list(reasons),
        "parent_trace_id": trace.parent_trace_id,
        "branch_at": trace.branch_at,
        "branch_hash": branch_hash,
        "prompt_length": trace.prompt_length,
        "engines": engines,
        "rescored": rescored,
        "drift": list(drift),
    }
    return seal(header, grade_of(reasons), spans, trace.token_ids, trace.logprobs)


def _span(span: Span, call: CallRecord, engines: list[Json]) -> Json:
    """Describe a span. Add its engine to `engines` if it is not there yet."""
    described: Json = {
        "kind": span.kind,
        "call_id": span.call_id,
        "choice": span.choice,
        "start": span.start,
        "end": span.end,
        "n": span.end - span.start,
        "prompt_mode": call.prompt_mode,
        "prompt_reason": call.prompt_reason,
    }
    if span.kind == "sampled":
        engine = _engine(call).model_dump()
        if engine not in engines:
            engines.append(engine)
        choice = next(choice for choice in call.choices if choice.index == span.choice)
        described |= {
            "engine": engines.index(engine),
            "versions": [list(run) for run in policy_versions(call, choice)],
            "past_reasoning": call.sampling.get("past_reasoning"),
            "sampling": sampling_overrides(call) if is_off_distribution(call) else None,
        }
    return described


def _engine(call: CallRecord) -> EngineIdentity:
    info = call.engine
    return EngineIdentity(
        engine=None if info is None else info.engine,
        version=None if info is None else info.version,
        model=call.model if info is None else info.model,
        template_hash=None if info is None else info.template_hash,
        logprob_mode=call.logprob_mode,
    )


def _events_in(trace: Trace, calls: Mapping[str, CallRecord], events: Sequence[DriftEvent]) -> list[DriftEvent]:
    """Return the drift events of calls whose first answer is in the trace.

    A call's other answers are in separate traces, in which only the prompt comes before them.
    """
    if not events:
        return []
    answers = {(span.call_id, span.choice) for span in trace.spans if span.kind == "sampled"}
    return [event for event in events if (event.call_id, calls[event.call_id].choices[0].index) in answers]
