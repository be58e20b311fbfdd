"""Rows of `tokens-jsonl`: one JSON object for each trace. Only this module writes and reads them.

A row has fields of its rollout (rollout_id, group_id, task_id, status, reward, ...), the trace's identity, and

    prompt_ids    the tokens before the first answer
    response_ids  all other tokens [m]
    loss_mask     [m], 1 where a token was sampled
    logprobs      [m], nats, as reported at sampling; null where the mask is 0
    spans         where each run of tokens came from: kind, call_id, choice, start, end; and for sampled tokens the
                  distribution (temperature, changes, logprob_mode) and the policy versions (`AnswerSampling`)
    certificate   the proof of all other fields (`certificate.Certificate`)

A row of builder `tree` holds its own tokens only: they follow the first `branch_at` tokens of the whole path of
`parent_trace_id` (null for a root).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar_proxy.errors import PolarError
from polar_proxy.sequences import find_layout_problem
from polar_proxy.types import AnswerSampling, Json, LogprobMode, Logprobs, Span, Trace

ROW_SCHEMA = 1
"""Version of the row format; raised when a field changes its meaning."""


class RowError(PolarError):
    """A row that cannot be used. `reason` is machine-readable, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def trace_identity(trace: Trace, rollout: Json) -> Json:
    """Return the first fields of a row: the format's version, the fields of `rollout`, and the trace's identity.

    `rollout`: the fields of the trace's rollout, or of its session if it has no rollout.
    """
    return {
        "schema": ROW_SCHEMA,
        **rollout,
        "trace_id": trace.trace_id,
        "trace_index": trace.index,
        "builder": trace.builder,
        "grade": trace.grade,
        "reward": trace.reward if trace.reward is not None else rollout.get("reward"),
    }


def write_row(trace: Trace, rollout: Json, certificate: Json | None = None) -> Json:
    """Return the row of a trace. `rollout`: the fields of its rollout."""
    start = trace.prompt_length
    mask = trace.loss_mask[start:].tolist()
    logprobs = trace.logprobs[start:].tolist()
    branch = {"parent_trace_id": trace.parent_trace_id, "branch_at": trace.branch_at}
    return {
        **trace_identity(trace, rollout),
        **(branch if trace.builder == "tree" else {}),
        "prompt_ids": trace.token_ids[:start].tolist(),
        "response_ids": trace.token_ids[start:].tolist(),
        "loss_mask": mask,
        "logprobs": [value if sampled else None for value, sampled in zip(logprobs, mask, strict=True)],
        "spans": list(_write_spans(trace)),
        "certificate": certificate,
    }


def _write_spans(trace: Trace) -> Iterator[Json]:
    samplings = iter(trace.sampling)
    for span in trace.spans:
        sampled = next(samplings)._asdict() if span.kind == "sampled" else {}
        yield {
            "kind": span.kind,
            "call_id": span.call_id,
            "choice": span.choice,
            "start": span.start,
            "end": span.end,
            **sampled,
        }


def read_row(row: Any) -> Trace:
    """Return the trace of a row, the same in every bit as when the row was written. If the trace had no reward then,
    it has the reward of its rollout.

    Raise RowError `newer_schema` for a newer row format. Raise RowError `malformed` if a field is missing or has a
    wrong type, or if fields contradict each other.
    """
    if not isinstance(row, dict):
        raise RowError("malformed", "a row must be a JSON object")
    name = f"the row {row.get('trace_id')}"
    schema = row.get("schema")
    if not isinstance(schema, int) or schema > ROW_SCHEMA:
        raise RowError(
            "newer_schema", f"{name} has schema {schema!r}, and this Polar reads up to {ROW_SCHEMA}: update Polar"
        )
    try:
        read = _RowFields.model_validate(row)
    except ValidationError as error:
        raise RowError("malformed", f"{name} is not a row of tokens-jsonl: {describe_errors(error)[0]}") from error
    prompt = len(read.prompt_ids)
    no_logprobs = [np.nan] * prompt
    logprobs: Logprobs = np.array([*no_logprobs, *(np.nan if v is None else v for v in read.logprobs)], np.float32)
    spans = tuple(Span(span.kind, span.call_id, span.start, span.end, span.choice) for span in read.spans)
    trace = Trace(
        trace_id=read.trace_id,
        session_id=read.session_id,
        rollout_id=read.rollout_id,
        builder=read.builder,
        index=read.trace_index,
        prompt_length=prompt,
        token_ids=np.array([*read.prompt_ids, *read.response_ids], np.int32),
        loss_mask=np.array([0] * prompt + read.loss_mask, np.uint8),
        logprobs=logprobs,
        spans=spans,
        call_ids=tuple(dict.fromkeys(span.call_id for span in spans if span.kind == "sampled")),
        reward=read.reward,
        grade=read.grade,
        parent_trace_id=read.parent_trace_id,
        branch_at=read.branch_at,
        rescored=read.certificate is not None and read.certificate.get("rescored") is not None,
        sampling=tuple(
            AnswerSampling(span.temperature, span.changes, span.logprob_mode, tuple(span.versions))
            for span in read.spans
            if isinstance(span, _SampledFields)
        ),
    )
    if (problem := find_layout_problem(trace)) is not None:
        raise RowError("malformed", f"the fields of {name} contradict each other: {problem}")
    return trace


def read_jsonl(path: Path | str) -> Iterator[Json]:
    """Yield the rows of a file that `polar export --format tokens-jsonl --out PATH` wrote."""
    with Path(path).open("rb") as lines:
        for line in lines:
            yield orjson.loads(line)


def describe_errors(error: ValidationError) -> list[str]:
    """Return one line for each error: the path of the field, and its problem."""
    return [f"{_path(one['loc'])}: {one['msg']}" for one in error.errors(include_url=False)]


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "the value"


_TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
_Count = Annotated[int, Field(strict=True, ge=0)]


class _ContextFields(BaseModel):
    model_config = ConfigDict(defer_build=True)

    kind: Literal["context"]
    call_id: str
    choice: _Count
    start: _Count
    end: _Count


class _SampledFields(_ContextFields):
    kind: Literal["sampled"]  # type: ignore[assignment]
    temperature: float | None
    changes: Json
    logprob_mode: LogprobMode
    versions: Annotated[list[tuple[_Count, str | None]], Field(min_length=1)]


class _RowFields(BaseModel):
    """The fields of a row from which its trace is read, with their types; other fields are allowed."""

    model_config = ConfigDict(defer_build=True)

    trace_id: str
    trace_index: _Count
    session_id: str
    rollout_id: str | None = None
    builder: str
    grade: str
    reward: float | None = None
    parent_trace_id: str | None = None
    branch_at: _Count = 0
    prompt_ids: list[_TokenId]
    response_ids: list[_TokenId]
    loss_mask: list[Annotated[int, Field(strict=True, ge=0, le=1)]]
    logprobs: list[Annotated[float, Field(strict=True, allow_inf_nan=False)] | None]
    spans: list[Annotated[_ContextFields | _SampledFields, Field(discriminator="kind")]]
    certificate: Json | None = None
