"""Certificates: what a trace is made of, in a form that a machine can check with the exported row alone.

`docs/certificate.md` describes the fields; `certificate.schema.json` beside this file is their JSON Schema.

In the store a certificate is kept small: what can be said again from the trace and its calls (spans, engines, hashes)
is left out but for the last hash, and `expand` puts it back. It must then come to the same last hash, so that a changed
call or trace in the database is found when a row is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar_proxy.errors import PolarError
from polar_proxy.traces import hash_chain
from polar_proxy.traces.drift import DriftEvent, drift_events
from polar_proxy.traces.grades import grade_of, grade_reasons, is_off_distribution, sampling_overrides, versions
from polar_proxy.traces.paths import trace_path
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.types import CallRecord, Choice, EngineInfo, Json, Span, Trace

SCHEMA = 1
"""Raised when a field changes its meaning; a checker refuses what is newer."""
_STORED = ("schema", "on_drift", "grade", "why", "drift", "rescored", "audit", "head")


class CertificateError(PolarError):
    """A stored trace is no longer what its certificate says: it, or a call of it, was changed in the database."""


def certificates(calls: Sequence[CallRecord], built: BuildResult) -> dict[str, Json]:
    """trace id -> the whole certificate of each trace of a build."""
    by_id = {call.call_id: call for call in calls}
    traces = {trace.trace_id: trace for trace in built.traces}
    return {
        trace.trace_id: _certificate(
            trace,
            traces,
            by_id,
            on_drift=built.on_drift,
            why=built.why.get(trace.trace_id, ()),
            drift=[found.to_json() for found in _concerning(trace, by_id, built.findings)],
            rescored=built.rescored_by if trace.rescored else None,
        )
        for trace in built.traces
    }


def stored(certificate: Json) -> Json:
    """What of it the store keeps."""
    return {name: certificate[name] for name in _STORED}


def expand(kept: Mapping[str, Json | None], traces: Sequence[Trace], calls: Sequence[CallRecord]) -> dict[str, Json]:
    """The whole certificates of stored traces: all those of one build, with all calls of their session.

    A trace that was stored without one (by an earlier version, which split on drift) gets it now. Raises
    CertificateError where what is stored has changed since.
    """
    by_id = {call.call_id: call for call in calls}
    by_trace = {trace.trace_id: trace for trace in traces}
    drifted: tuple[DriftEvent, ...] | None = None
    found: dict[str, Json] = {}
    for trace in traces:
        told = kept.get(trace.trace_id)
        if told is None:
            drifted = drift_events(calls) if drifted is None else drifted
            whole = _certificate(
                trace,
                by_trace,
                by_id,
                on_drift="split" if trace.builder == "merged" else None,
                why=_reasons(trace, by_id),
                drift=[one.to_json() for one in _concerning(trace, by_id, drifted)],
                rescored=None,
            )
        else:
            whole = _certificate(
                trace,
                by_trace,
                by_id,
                on_drift=told["on_drift"],
                why=told["why"],
                drift=told["drift"],
                rescored=told["rescored"],
            )
            if whole["head"] != told["head"]:
                raise CertificateError(
                    f"The trace {trace.trace_id} is not what its certificate says: it or its calls were changed in the "
                    f"database. Build it again with `polar build {trace.session_id}` if that was meant."
                )
            whole |= {"grade": told["grade"], "audit": told["audit"]}
        found[trace.trace_id] = whole
    return found


def _certificate(
    trace: Trace,
    traces: Mapping[str, Trace],
    calls: Mapping[str, CallRecord],
    *,
    on_drift: str | None,
    why: Sequence[str],
    drift: Sequence[Json],
    rescored: Json | None,
) -> Json:
    engines: list[Json] = []
    spans = [_span(span, calls[span.call_id], engines) for span in trace.spans]
    before = None
    if trace.parent_trace_id is not None:
        before = hash_chain.tokens_hash(trace_path(trace, traces).token_ids[: trace.branch_at])
    made: Json = {
        "schema": SCHEMA,
        "trace_id": trace.trace_id,
        "session_id": trace.session_id,
        "rollout_id": trace.rollout_id,
        "builder": trace.builder,
        "on_drift": on_drift,
        "grade": grade_of(why),
        "why": list(why),
        "parent_trace_id": trace.parent_trace_id,
        "branch_at": trace.branch_at,
        "branch_hash": before,
        "prompt_length": trace.prompt_length,
        "engines": engines,
        "rescored": rescored,
        "drift": list(drift),
        "audit": None,
    }
    first = hash_chain.seed(made)
    chain = hash_chain.links(first, spans, trace.token_ids, trace.logprobs)
    return {
        **made,
        "seed": first.hex(),
        "spans": [{**span, "hash": link.hex()} for span, link in zip(spans, chain, strict=True)],
        "head": (chain[-1] if chain else first).hex(),
    }


def _span(span: Span, call: CallRecord, engines: list[Json]) -> Json:
    """The identity of a span; `engines` gathers what its `engine` points at."""
    told: Json = {
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
        engine = _engine(call)
        if engine not in engines:
            engines.append(engine)
        told |= {
            "engine": engines.index(engine),
            "versions": [list(run) for run in versions(call, _choice(span, call))],
            "past_reasoning": call.sampling.get("past_reasoning"),
            "sampling": sampling_overrides(call) if is_off_distribution(call) else None,
        }
    return told


def _engine(call: CallRecord) -> Json:
    info: EngineInfo | None = call.engine
    return {
        "engine": None if info is None else info.engine,
        "version": None if info is None else info.version,
        "model": call.model if info is None else info.model,
        "template_hash": None if info is None else info.template_hash,
        "logprob_mode": call.logprob_mode,
    }


def _choice(span: Span, call: CallRecord) -> Choice:
    return next(choice for choice in call.choices if choice.index == span.choice)


def _reasons(trace: Trace, calls: Mapping[str, CallRecord]) -> list[str]:
    sampled = [(calls[span.call_id], span) for span in trace.spans if span.kind == "sampled"]
    return sorted({reason for call, span in sampled for reason in grade_reasons(call, _choice(span, call))})


def _concerning(trace: Trace, calls: Mapping[str, CallRecord], found: Sequence[DriftEvent]) -> list[DriftEvent]:
    """The drifted calls whose first answer is in the trace; their other answers only have their prompt before them."""
    own = {(span.call_id, span.choice) for span in trace.spans if span.kind == "sampled"} if found else set()
    return [one for one in found if (one.call_id, calls[one.call_id].choices[0].index) in own]
