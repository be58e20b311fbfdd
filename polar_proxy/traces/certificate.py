"""The certificate of a trace: the origin of its tokens, in a form that a machine checks with the exported row alone.

`Certificate` is the model; its JSON Schema is `Certificate.model_json_schema()`. The hash chain makes each span's hash
cover everything before it:

    seed   = H("", header)                                header: the fields that `header_of` names
    hash_k = H(hash_{k-1}, span_k, tokens_k, logprobs_k)  hash_0 = seed, head = the last hash

H is blake2b with a 16-byte digest. Header and span (without its hash) are canonical JSON (sorted keys, no spaces,
UTF-8), each after its length as 4 bytes little-endian. Tokens are int32 and log-probabilities float32, both
little-endian; only sampled spans hash log-probabilities.

A checker needs this module and a row, and not the calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field

from polar_proxy.traces.drift import DriftEvent, DriftPolicy
from polar_proxy.traces.grades import Grade, Reason
from polar_proxy.types import Json, LogprobMode, Logprobs, PromptMode, TokenIds

SCHEMA = 1
"""Increased when a field changes its meaning; a checker refuses newer certificates."""

Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Field(strict=True, ge=0)]

_NOT_IN_SEED = {"grade", "audit", "spans", "seed", "head"}
_STORED = {"schema_version", "on_drift", "grade", "grade_reasons", "drift", "rescored", "audit", "head"}
_PERSON = b"polar trace"


class CertificateModel(BaseModel):
    """Base of the certificate's parts: no unknown fields, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineIdentity(CertificateModel):
    """An engine that sampled; fields are None if the record does not contain them."""

    engine: str | None
    version: str | None
    model: str | None
    template_hash: str | None
    logprob_mode: LogprobMode


class ScorerIdentity(CertificateModel):
    """The engine that computed the log-probabilities of a rescored trace."""

    engine: str
    version: str
    model: str
    weight_version: str | None


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
    """Tokens of a call's prompt."""

    kind: Literal["context"]


class SampledSpan(CallSpan):
    """A whole sampled answer of a call."""

    kind: Literal["sampled"]
    engine: Count
    """Index into `engines`."""
    versions: Annotated[list[tuple[Count, str | None]], Field(min_length=1)]
    """(first position within the answer, policy version) of each run of tokens."""
    past_reasoning: Literal["keep", "strip"] | None
    """The setting under which the prompt was continued; None if it had no effect."""
    sampling: Json | None
    """The settings that changed the distribution, if raw log-probabilities were recorded."""


CertificateSpan = Annotated[ContextSpan | SampledSpan, Field(discriminator="kind")]


class Certificate(CertificateModel):
    """The origin of each token of a trace, and the reasons for its grade."""

    model_config = ConfigDict(title="Certificate of a Polar trace")

    schema_version: Annotated[int, Field(alias="schema", strict=True, ge=SCHEMA, le=SCHEMA)]
    trace_id: str
    session_id: str
    rollout_id: str | None
    builder: Literal["per_call", "merged", "tree", "rescored"]
    on_drift: DriftPolicy | None
    grade: Grade
    grade_reasons: list[Reason]
    """Why the grade is not `exact`."""
    parent_trace_id: str | None
    branch_at: Count
    branch_hash: Hash | None
    """Hash of the first `branch_at` tokens of the parent's whole path."""
    prompt_length: Count
    engines: list[EngineIdentity]
    rescored: ScorerIdentity | None
    drift: list[DriftEvent]
    audit: Json | None
    seed: Hash
    spans: Annotated[list[CertificateSpan], Field(min_length=1)]
    head: Hash

    def header(self) -> Json:
        """Return the fields that the seed covers: all except the spans and those that an audit may change."""
        return self.model_dump(by_alias=True, exclude=_NOT_IN_SEED)

    def to_json(self) -> Json:
        return self.model_dump(by_alias=True)

    def stored(self) -> Json:
        """Return the fields that are stored. The others are derived again from the trace and its calls."""
        return self.model_dump(by_alias=True, include=_STORED)


def seal(header: Json, grade: str, spans: Sequence[Json], token_ids: TokenIds, logprobs: Logprobs) -> Certificate:
    """Make a certificate: compute the hashes of `header` and of `spans`, which have no hashes yet.

    `token_ids` int32 [n] and `logprobs` float32 [n] are the trace's own.
    """
    seed = hash_json(b"", header)
    hashes = [link.hex() for link in hash_spans(seed, spans, token_ids, logprobs)]
    sealed = [{**span, "hash": link} for span, link in zip(spans, hashes, strict=True)]
    fields = {**header, "grade": grade, "audit": None, "seed": seed.hex(), "spans": sealed}
    return Certificate.model_validate({**fields, "head": hashes[-1] if hashes else seed.hex()})


def hash_spans(seed: bytes, spans: Iterable[Json], token_ids: TokenIds, logprobs: Logprobs) -> list[bytes]:
    """Return the hash of each span. `token_ids` int32 [n] and `logprobs` float32 [n] are tiled by the spans in
    order."""
    ids, values = np.ascontiguousarray(token_ids, "<i4"), np.ascontiguousarray(logprobs, "<f4")
    hashes: list[bytes] = []
    link, position = seed, 0
    for span in spans:
        here = slice(position, position + span["n"])
        sampled = values[here].tobytes() if span["kind"] == "sampled" else b""
        link = hash_json(link, span, ids[here].tobytes(), sampled)
        hashes.append(link)
        position = here.stop
    return hashes


def hash_json(before: bytes, value: Any, *data: bytes) -> bytes:
    return _digest(before, orjson.dumps(value, option=orjson.OPT_SORT_KEYS), *data)


def hash_tokens(token_ids: TokenIds) -> str:
    """Return the hash of the tokens before a branch."""
    return _digest(b"", np.ascontiguousarray(token_ids, "<i4").tobytes()).hex()


def _digest(before: bytes, framed: bytes, *data: bytes) -> bytes:
    digest = blake2b(before, digest_size=16, person=_PERSON)
    digest.update(struct.pack("<I", len(framed)))
    digest.update(framed)
    for piece in data:
        digest.update(piece)
    return digest.digest()
