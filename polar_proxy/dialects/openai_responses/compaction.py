"""`POST /v1/responses/compact`: the model summarises a conversation, and the summary replaces it in later requests.

Source: https://platform.openai.com/docs/api-reference/responses/compact

The model gets the conversation, followed by an instruction to summarise it. The call is recorded like a response with
`store: false`, because the API has no way to retrieve a compaction. The answer holds the user's messages and one item
of type `compaction` with the summary. If the client sends this item back in a later request, the model gets the summary
as a user message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import orjson

from polar_proxy.dialects.base import Answer, Encoder, ParsedRequest
from polar_proxy.dialects.fields import missing, unsupported
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.dialects.openai_responses.encoder import usage_object
from polar_proxy.dialects.openai_responses.input import input_items
from polar_proxy.dialects.openai_responses.items import input_item_id, item_id, listed_item, response_id
from polar_proxy.dialects.wire import seal
from polar_proxy.types import Json, SampleEvent

INSTRUCTION = (
    "The conversation is compacted now: everything above, except the user's messages, is replaced by a summary that"
    " you write. Do not call tools and do not go on with the task. Write down what the work needs to go on: what the"
    " user wants and has decided, what was done and found out, with names, paths and values, and what is left to do."
)
_PREAMBLE = "The conversation up to here was compacted. This is its summary:\n\n"


class ResponsesCompaction(OpenAIResponses):
    """Dialect of the compaction route. Its calls are recorded like those of `OpenAIResponses`, which also parses the
    records."""

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        for name in ("stream", "background"):
            if body.get(name):
                raise unsupported(name, "a compaction is sent in one piece, when it is finished")
        if body.get("conversation") is not None:
            raise unsupported("conversation", "send its items in 'input'")
        if not body.get("model"):
            raise missing("model")
        items = input_items(body.get("input"))
        instruction = {"type": "message", "role": "user", "content": INSTRUCTION}
        parsed = super().parse({**body, "input": [*items, instruction] if items else None, "store": False})
        users = [(position, item) for position, item in enumerate(items) if item.get("role") == "user"]
        return replace(parsed, encoder=partial(_CompactionEncoder, users=users))


@dataclass
class _CompactionEncoder(Encoder):
    users: list[tuple[int, Json]]
    """The user's messages with their positions in the input."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        return b""

    def end(self, answers: list[Answer]) -> bytes:
        return b""

    def fail(self, message: str, status: int) -> bytes:
        return b""

    def respond(self, answers: list[Answer]) -> bytes:
        summary = _PREAMBLE + "".join(answers[0].first.text).strip()
        compaction = {
            "id": item_id("cmp", self.call_id, 0),
            "type": "compaction",
            "encrypted_content": seal(summary),
        }
        users = [listed_item(item, input_item_id(self.call_id, position)) for position, item in self.users]
        return orjson.dumps(
            {
                "id": response_id(self.call_id),
                "object": "response.compaction",
                "created_at": self.created,
                "output": [*users, compaction],
                "usage": usage_object(answers[0]),
            }
        )
