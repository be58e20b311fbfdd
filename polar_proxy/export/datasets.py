"""Dataset rows, one pure function a format, each from one rollout's (or session's) calls and traces.

`jsonl`         one line a rollout: what was asked, said and scored, call by call; no tokens
`chat-jsonl`    one line a trace: the conversation in OpenAI form with its tools, for SFT on text
`tokens-jsonl`  one line a trace: ids, mask, log-probabilities and the certificate that proves them, for training on
                exactly what was sampled

Messages and tools are in OpenAI's form whatever dialect the agent spoke, as the engine was told them. A call that
cannot be read so is written raw, with the reason in `unparsed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects import recorded_request
from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, Json, TextRequest, Trace

SCHEMA = 1
"""Version of the row formats; raised when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class SessionExport:
    """All there is to write about one rollout, or about one session that has no rollout."""

    meta: Json
    """rollout_id, session_id, group_id, task_id, harness, engine, model, seed, status, reward, ..."""
    calls: Sequence[CallRecord]
    traces: Sequence[Trace]
    excluded: Mapping[str, str]
    certificates: Mapping[str, Json] = field(default_factory=dict)
    """Whole ones, by trace id."""


def jsonl(selection: SessionExport) -> Iterator[Json]:
    yield {
        "schema": SCHEMA,
        **selection.meta,
        "calls": [
            {
                "call_id": call.call_id,
                "status": call.status,
                "error": call.error,
                "edge": call.edge,
                "parent_call_id": call.parent_call_id,
                "dialect": call.dialect,
                "started_at": call.started_at,
                "seconds": call.ended_at - call.started_at,
                **conversation(call),
                "sampling": call.sampling,
                "choices": [{"message": c.message, "finish_reason": c.finish_reason} for c in call.choices],
                "prompt_tokens": 0 if call.prompt_ids is None else len(call.prompt_ids),
                "completion_tokens": sum(len(choice.token_ids) for choice in call.choices),
            }
            for call in selection.calls
        ],
        "traces": len(selection.traces),
        "excluded": dict(selection.excluded),
    }


def chat_jsonl(selection: SessionExport) -> Iterator[Json]:
    """The last call of a trace holds its whole conversation; its answer is the sampled choice that ends the trace."""
    calls = {call.call_id: call for call in selection.calls}
    for trace in selection.traces:
        last = trace.spans[-1]
        call = calls[last.call_id]
        choice = next(choice for choice in call.choices if choice.index == last.choice)
        row = conversation(call)
        row["messages"].append(choice.message)
        if row["tools"] is None:
            del row["tools"]
        yield {**row, **_identity(selection, trace)}


def tokens_jsonl(selection: SessionExport) -> Iterator[Json]:
    """`logprobs` is null where the mask is 0: nothing was sampled there.

    A row of builder `tree` holds its own tokens only: they come behind the first `branch_at` tokens of the whole path
    of `parent_trace_id` (null for a root).
    """
    for trace in selection.traces:
        start = trace.prompt_length
        logprobs = [
            float(value) if sampled else None
            for value, sampled in zip(trace.logprobs[start:], trace.loss_mask[start:], strict=True)
        ]
        branch = {"parent_trace_id": trace.parent_trace_id, "branch_at": trace.branch_at}
        yield {
            **_identity(selection, trace),
            **(branch if trace.builder == "tree" else {}),
            "prompt_ids": trace.token_ids[:start].tolist(),
            "response_ids": trace.token_ids[start:].tolist(),
            "loss_mask": trace.loss_mask[start:].tolist(),
            "logprobs": logprobs,
            "spans": [
                {
                    "kind": span.kind,
                    "call_id": span.call_id,
                    "choice": span.choice,
                    "start": span.start,
                    "end": span.end,
                }
                for span in trace.spans
            ],
            "certificate": selection.certificates.get(trace.trace_id),
        }


DATASET_FORMATS: dict[str, Callable[[SessionExport], Iterator[Json]]] = {
    "jsonl": jsonl,
    "chat-jsonl": chat_jsonl,
    "tokens-jsonl": tokens_jsonl,
}


def _identity(selection: SessionExport, trace: Trace) -> Json:
    return {
        "schema": SCHEMA,
        **selection.meta,
        "trace_id": trace.trace_id,
        "trace_index": trace.index,
        "builder": trace.builder,
        "grade": trace.grade,
        "reward": trace.reward if trace.reward is not None else selection.meta.get("reward"),
    }


def conversation(call: CallRecord) -> Json:
    """{"messages", "tools"} of what a call asked, `tools` null where it offered none; with "unparsed" if they are raw.

    A raw prompt (Completions) has no roles and is told as such.
    """
    try:
        request = recorded_request(call)
    except RequestError as error:
        tools = None if call.tools is None else _raw(call.tools)
        return {"messages": [_raw(message) for message in call.messages], "tools": tools, "unparsed": str(error)}
    if isinstance(request, TextRequest):
        return {"messages": [{"role": "prompt", "content": request.prompt}], "tools": None}
    return {"messages": [message.to_openai() for message in request.messages], "tools": list(request.tools) or None}


def _raw(stored: bytes) -> Any:
    try:
        return orjson.loads(stored)
    except orjson.JSONDecodeError:
        return stored.decode(errors="replace")
