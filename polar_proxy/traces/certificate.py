"""The certificate of a trace: the origin of its tokens. A program can check it with nothing but the exported row.

`Certificate` is the model; its JSON Schema is `Certificate.model_json_schema()`. Polar makes certificates as plain
JSON; the model is for reading certificates that came from elsewhere. The hash chain makes each span's hash cover
everything before it:

    seed   = H("", header)                                header: the fields of `Certificate.header`
    hash_k = H(hash_{k-1}, span_k, tokens_k, logprobs_k)  hash_0 = seed, head = the last hash

H is blake2b with a 16-byte digest. Header and span (without its hash) are canonical JSON (sorted keys, no spaces,
UTF-8), each preceded by its length (4 bytes, little-endian). Tokens are int32 and log-probabilities float32, both
little-endian; only sampled spans hash log-probabilities.

A checker needs only the row, not the calls. The store leaves out the parts of a certificate that follow from the trace
and its calls: identity, engines, spans and all hashes but the last. `restore` derives these parts again, and must get
the same last hash. So if a trace or one of its calls was changed in the database, this is detected when a row is made
of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field

from polar_proxy.errors import PolarError
from polar_proxy.sequences import answer_sampling, trace_path
from polar_proxy.traces.drift import DriftEvent, DriftPolicy
from polar_proxy.traces.grades import Grade, Reason, grade_of
from polar_proxy.types import CallRecord, EngineInfo, Json, LogprobMode, Logprobs, PromptMode, Span, TokenIds, Trace

if TYPE_CHECKING:
    from polar_proxy.traces.builders import BuildResult

CERTIFICATE_SCHEMA = 2
"""Version of the certificate format, raised when a field changes its meaning. A checker refuses every other version."""

Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Field(strict=True, ge=0)]

IDENTITY_FIELDS = ("trace_id", "session_id", "rollout_id", "builder", "parent_trace_id", "branch_at", "prompt_length")
"""The fields of a trace that its certificate repeats."""
_NOT_IN_SEED = {"grade", "audit", "spans", "seed", "head"}
_PERSON = b"polar trace"


class CertificateError(PolarError):
    """A stored trace has no valid certificate: another version of Polar wrote the certificate, or the trace or one of
    its calls was changed in the database."""


# ---------------------------------------------------------------- the model


class CertificateModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class EngineIdentity(CertificateModel):
    """An engine that sampled; fields are None if the record does not contain them."""

    engine: str | None
    version: str | None
    model: str | None
    template_hash: str | None
    precision: str | None
    logprob_mode: LogprobMode


class ScorerIdentity(CertificateModel):
    """The engine that computed the log-probabilities of a rescored trace."""

    engine: str
    version: str
    model: str
    weight_version: str | None

    @classmethod
    def of(cls, info: EngineInfo, weight_version: str | None) -> ScorerIdentity:
        return cls(engine=info.engine, version=info.version, model=info.model, weight_version=weight_version)


class CallSpan(CertificateModel):
    """A run of tokens of one call: `[start, end)` of its prompt or of one of its answers."""

    call_id: str
    choice: Count
    start: Count
    end: Count
    n: Annotated[int, Field(strict=True, ge=1)]
    """Number of tokens."""
    prompt_mode: PromptMode
    prompt_reason: str | None
    hash: Hash


class ContextSpan(CallSpan):
    kind: Literal["context"]


class SampledSpan(CallSpan):
    """A whole sampled answer of a call."""

    kind: Literal["sampled"]
    engine: Count
    """Index into `engines`."""
    versions: Annotated[list[tuple[Count, str | None]], Field(min_length=1)]
    """The runs of tokens with one policy version, each as (first position within the answer, policy version)."""
    past_reasoning: Literal["keep", "strip"] | None
    """The setting `past_reasoning`, if the prompt continues a call or `strip` prevented that; otherwise None."""
    temperature: float | None
    changes: Json
    """Settings besides the temperature that changed the distribution, such as top_p or a penalty."""


CertificateSpan = Annotated[ContextSpan | SampledSpan, Field(discriminator="kind")]


class StoredCertificate(CertificateModel):
    """The fields of a certificate that do not follow from the trace and its calls, and `head`, the last span's hash."""

    schema_version: Annotated[int, Field(alias="schema", strict=True, ge=CERTIFICATE_SCHEMA, le=CERTIFICATE_SCHEMA)]
    on_drift: DriftPolicy | None
    grade: Grade
    grade_reasons: list[Reason]
    """Why the grade is not `exact`."""
    drift: list[DriftEvent]
    rescored: ScorerIdentity | None
    audit: Json | None
    head: Hash


class Certificate(StoredCertificate):
    """The origin of each token of a trace, and the reasons for its grade."""

    model_config = ConfigDict(title="Certificate of a Polar trace")

    trace_id: str
    session_id: str
    rollout_id: str | None
    builder: Literal["per_call", "merged", "tree", "rescored"]
    parent_trace_id: str | None
    branch_at: Count
    branch_hash: Hash | None
    """Hash of the tokens before the branch: the first `branch_at` tokens of the sequence from the root through the
    parent."""
    prompt_length: Count
    engines: list[EngineIdentity]
    seed: Hash
    spans: Annotated[list[CertificateSpan], Field(min_length=1)]

    def header(self) -> Json:
        """Return the fields that are hashed into `seed`.

        These are all fields except `spans`, `seed`, `head`, and those that an audit may change (`grade`, `audit`).
        """
        return self.model_dump(by_alias=True, exclude=_NOT_IN_SEED)


# ---------------------------------------------------------------- making certificates


def certify(calls: Sequence[CallRecord], build: BuildResult) -> dict[str, Json]:
    """Return trace id -> certificate for the traces of a build."""
    by_id = {call.call_id: call for call in calls}
    traces = {trace.trace_id: trace for trace in build.traces}
    found = {}
    for trace in build.traces:
        origin: Json = {
            "on_drift": build.on_drift,
            "grade_reasons": list(build.grade_reasons[trace.trace_id]),
            "drift": [event.model_dump() for event in _events_in(trace, by_id, build.drift_events)],
            "rescored": build.rescored_by.model_dump() if trace.rescored and build.rescored_by is not None else None,
        }
        found[trace.trace_id] = _certificate(trace, traces, by_id, origin)
    return found


def stored_form(certificate: Json) -> Json:
    """Return the fields that are stored. The others are derived again from the trace and its calls."""
    names = (field.alias or name for name, field in StoredCertificate.model_fields.items())
    return {name: certificate[name] for name in names}


def restore(stored: Mapping[str, Json | None], traces: Sequence[Trace], calls: Sequence[CallRecord]) -> dict[str, Json]:
    """Return trace id -> certificate for stored traces.

    `stored`: trace id -> certificate in its stored form. `traces`: all traces of one build. `calls`: all calls of their
    session, with the tokens that the traces refer to. Raise CertificateError if a trace or a call has changed since the
    build, or if a certificate is missing or of another `CERTIFICATE_SCHEMA`.
    """
    by_id = {call.call_id: call for call in calls}
    by_trace = {trace.trace_id: trace for trace in traces}
    found: dict[str, Json] = {}
    for trace in traces:
        kept = stored.get(trace.trace_id)
        if kept is not None and kept["schema"] != CERTIFICATE_SCHEMA:
            raise CertificateError(
                f"The certificate of the trace {trace.trace_id} was written by another version of Polar: build the "
                f"trace again with `polar build {trace.session_id}`."
            )
        derived = None if kept is None else _certificate(trace, by_trace, by_id, kept)
        if kept is None or derived is None or derived["head"] != kept["head"]:
            raise CertificateError(
                f"The trace {trace.trace_id} does not match its certificate: the trace or a call was changed in "
                f"the database. If that was intended, build it again with `polar build {trace.session_id}`."
            )
        found[trace.trace_id] = {**derived, "grade": kept["grade"], "audit": kept["audit"]}
    return found


def _certificate(trace: Trace, traces: Mapping[str, Trace], calls: Mapping[str, CallRecord], origin: Json) -> Json:
    """Make the certificate of `trace`.

    `origin`: the fields that do not follow from trace and calls: on_drift, grade_reasons, drift, rescored.
    """
    engines: list[Json] = []
    spans = [_span(span, calls[span.call_id], engines) for span in trace.spans]
    branch_hash = None
    if trace.parent_trace_id is not None:
        branch_hash = hash_tokens(trace_path(trace, traces).token_ids[: trace.branch_at])
    header: Json = {
        "schema": CERTIFICATE_SCHEMA,
        **{name: getattr(trace, name) for name in IDENTITY_FIELDS},
        "on_drift": origin["on_drift"],
        "grade_reasons": origin["grade_reasons"],
        "branch_hash": branch_hash,
        "engines": engines,
        "rescored": origin["rescored"],
        "drift": origin["drift"],
    }
    seed = hash_json(b"", header)
    hashes = [link.hex() for link in hash_spans(seed, spans, trace.token_ids, trace.logprobs)]
    for span, link in zip(spans, hashes, strict=True):
        span["hash"] = link
    grade = grade_of(origin["grade_reasons"])
    return {**header, "grade": grade, "audit": None, "seed": seed.hex(), "spans": spans, "head": hashes[-1]}


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
        engine = _engine(call)
        if engine not in engines:
            engines.append(engine)
        sampling = answer_sampling(call, next(choice for choice in call.choices if choice.index == span.choice))
        described |= {
            "engine": engines.index(engine),
            "versions": [list(run) for run in sampling.versions],
            "past_reasoning": call.sampling.get("past_reasoning"),
            "temperature": sampling.temperature,
            "changes": sampling.changes,
        }
    return described


def _engine(call: CallRecord) -> Json:
    """Return the fields of `EngineIdentity`."""
    info = call.engine
    return {
        "engine": None if info is None else info.engine,
        "version": None if info is None else info.version,
        "model": call.model if info is None else info.model,
        "template_hash": None if info is None else info.template_hash,
        "precision": None if info is None else info.precision,
        "logprob_mode": call.logprob_mode,
    }


def _events_in(trace: Trace, calls: Mapping[str, CallRecord], events: Sequence[DriftEvent]) -> list[DriftEvent]:
    """Return the drift events of the calls whose first answer is in the trace.

    A call's other answers have traces of their own. These begin with the call's own prompt, so no drift shows in them.
    """
    if not events:
        return []
    answers = {(span.call_id, span.choice) for span in trace.spans if span.kind == "sampled"}
    return [event for event in events if (event.call_id, calls[event.call_id].choices[0].index) in answers]


# ---------------------------------------------------------------- hashes


def hash_spans(seed: bytes, spans: Iterable[Json], token_ids: TokenIds, logprobs: Logprobs) -> list[bytes]:
    """Return the hash of each span.

    Together, in order, the spans cover `token_ids` (int32 [n]) and `logprobs` (float32 [n]).
    """
    ids, values = _bytes_of(token_ids, "<i4"), _bytes_of(logprobs, "<f4")
    hashes: list[bytes] = []
    link, position = seed, 0
    for span in spans:
        here = slice(position, position + 4 * span["n"])
        link = hash_json(link, span, ids[here], values[here] if span["kind"] == "sampled" else b"")
        hashes.append(link)
        position = here.stop
    return hashes


def _bytes_of(array: npt.NDArray[Any], form: str) -> memoryview:
    return memoryview(np.ascontiguousarray(array, form).tobytes())


def hash_json(before: bytes, value: Any, *data: bytes | memoryview) -> bytes:
    return _digest(before, orjson.dumps(value, option=orjson.OPT_SORT_KEYS), *data)


def hash_tokens(token_ids: TokenIds) -> str:
    """Return the hash of the tokens before a branch."""
    return _digest(b"", np.ascontiguousarray(token_ids, "<i4").tobytes()).hex()


def _digest(before: bytes, framed: bytes, *data: bytes | memoryview) -> bytes:
    whole = b"".join((before, len(framed).to_bytes(4, "little"), framed, *data))
    return blake2b(whole, digest_size=16, person=_PERSON).digest()
