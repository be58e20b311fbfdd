"""The dataset formats. Each is a pure function that turns the calls and traces of a rollout or session into rows.

jsonl         one line for each rollout: its reward, and the request and answers of each call; no tokens
chat-jsonl    one line for each trace, and one for each conversation with a hosted model: messages and tools in OpenAI
              form, for SFT on text
tokens-jsonl  one line for each trace: ids, mask, log-probabilities and certificate (`traces/rows.py`)

Messages and tools are those that the engine received (`conversations.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from polar_proxy.export.conversations import ConversationReader
from polar_proxy.export.text_conversations import text_conversations
from polar_proxy.traces.rows import ROW_SCHEMA, trace_identity, write_row
from polar_proxy.types import CallRecord, Choice, Json, Trace


@dataclass(frozen=True, slots=True)
class SessionExport:
    """The calls and traces of one rollout, or of one session that has no rollout."""

    rollout: Json
    """The rollout's fields: rollout_id, session_id, group_id, task_id, harness, engine, model, reward, ..."""
    calls: Sequence[CallRecord]
    traces: Sequence[Trace]
    excluded: Mapping[str, str]
    """call id -> reason"""
    certificates: Mapping[str, Json] = field(default_factory=dict)
    """trace id -> certificate"""


def jsonl(session: SessionExport) -> Iterator[Json]:
    """Yield one row. Its `calls` are an iterator, because a list of a long session's calls would take much memory."""
    reader = ConversationReader()
    yield {
        "schema": ROW_SCHEMA,
        **session.rollout,
        "calls": (
            {
                "call_id": call.call_id,
                "status": call.status,
                "error": call.error,
                "edge": call.edge,
                "parent_call_id": call.parent_call_id,
                "dialect": call.dialect,
                "started_at": call.started_at,
                "seconds": call.ended_at - call.started_at,
                **reader.read(call),
                "sampling": call.sampling,
                "choices": [
                    {"message": choice.message.to_openai(), "finish_reason": choice.finish_reason}
                    for choice in call.choices
                ],
                "prompt_tokens": call.prompt_tokens,
                "completion_tokens": call.completion_tokens,
                "usage": None if call.usage is None else asdict(call.usage),
                "price_usd": call.price_usd,
            }
            for call in session.calls
        ),
        "traces": len(session.traces),
        "excluded": dict(session.excluded),
    }


def chat_jsonl(session: SessionExport) -> Iterator[Json]:
    """Yield a row for each trace: the conversation of its last call, and the answer that ends the trace.

    Then yield a row for each conversation that was recorded as text. In such a row, `trace_id` and `grade` are null.
    """
    calls = {call.call_id: call for call in session.calls}
    reader = ConversationReader()
    for trace in session.traces:
        last = trace.spans[-1]
        call = calls[last.call_id]
        choice = next(choice for choice in call.choices if choice.index == last.choice)
        yield {**_chat(reader, call, choice), **trace_identity(trace, session.rollout)}
    for conversation in text_conversations(session.calls, session.excluded):
        call = conversation.last
        identity = {"schema": ROW_SCHEMA, **session.rollout, "trace_id": None, "grade": None, "call_id": call.call_id}
        prices = [one.price_usd for one in conversation.calls]
        price = None if None in prices else sum(filter(None, prices))
        yield {**_chat(reader, call, call.choices[0]), **identity, "price_usd": price}


def _chat(reader: ConversationReader, call: CallRecord, answer: Choice) -> Json:
    """Return the conversation of a call and one of its answers. Without tools, the field `tools` is left out."""
    chat = reader.read(call)
    chat["messages"].append(answer.message.to_openai())
    if chat["tools"] is None:
        del chat["tools"]
    return chat


def tokens_jsonl(session: SessionExport) -> Iterator[Json]:
    for trace in session.traces:
        yield write_row(trace, session.rollout, session.certificates.get(trace.trace_id))


DATASET_FORMATS: dict[str, Callable[[SessionExport], Iterator[Json]]] = {
    "jsonl": jsonl,
    "chat-jsonl": chat_jsonl,
    "tokens-jsonl": tokens_jsonl,
}
