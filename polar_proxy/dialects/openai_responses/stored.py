"""Recorded responses as the API shows them: the response object, its event stream and its input items.

They are made from the record alone. The object differs in two ways from the object that the client got. The items of
the answer are in the order reasoning, text, tool calls. There are no log-probabilities, because the record does not
have the texts of single tokens. The stream has each text in one piece.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from polar_proxy.dialects import parse_recorded
from polar_proxy.dialects.base import Answer, AnswerChoice
from polar_proxy.dialects.openai_responses.encoder import ResponsesEncoder
from polar_proxy.dialects.openai_responses.items import input_item_id, listed_item
from polar_proxy.types import ANSWERED, SAMPLING_FIELDS, CallRecord, Json, Sampling


def response_object(call: CallRecord) -> bytes:
    """Return the response object of an answered call, or of a background call that ended early.

    Raises RequestError for a damaged record.
    """
    encoder = _encoder(call)
    if call.status in ANSWERED:
        return encoder.respond([recorded_answer(call)])
    status = "cancelled" if call.status == "client_gone" else "failed"
    return encoder.ended_early(status, call.error or call.status)


def response_events(call: CallRecord, starting_after: int | None) -> bytes:
    """Return the event stream of an answered call; with `starting_after`, only the events after this number.

    Raises RequestError for a damaged record.
    """
    stream = _encoder(call).replay(recorded_answer(call))
    if starting_after is None:
        return stream
    events = stream.split(b"\n\n")[:-1]  # there are no line breaks inside an event's JSON
    return b"".join(event + b"\n\n" for event in events[starting_after + 1 :])


def _encoder(call: CallRecord) -> ResponsesEncoder:
    parsed = parse_recorded(call)
    sampling = Sampling(**{name: call.sampling[name] for name in SAMPLING_FIELDS if name in call.sampling})
    sampled = replace(parsed.requests[0], model=call.model, sampling=sampling)
    encoder = parsed.encoder(call.call_id, int(call.started_at), sampled=sampled)
    assert isinstance(encoder, ResponsesEncoder)
    return encoder


def recorded_answer(call: CallRecord) -> Answer:
    """Return the answer of a recorded call in the form that encoders take."""
    choices = {
        choice.index: AnswerChoice(
            text=[str(choice.message.content or "")],
            reasoning=[choice.message.reasoning or ""],
            tool_calls=list(choice.message.tool_calls),
            token_ids=choice.token_ids.tolist(),
            finish_reason=choice.finish_reason,
            reasoning_tokens=choice.reasoning_tokens,
        )
        for choice in call.choices
    }
    prompt_ids = None if call.prompt_ids is None else call.prompt_ids.tolist()
    return Answer(prompt_ids, call.cached_tokens, choices, call.usage, call.ended_at)


def listed_input(call: CallRecord) -> list[Json]:
    """Return the input items of a response, in order, as the API shows them. Instructions are left out.

    If the client gave an item no id, the item gets an id here, so that later requests can refer to it.
    """
    items: list[Json] = [orjson.loads(message) for message in call.messages]
    return [
        listed_item(item, input_item_id(call.call_id, position))
        for position, item in enumerate(items)
        if item.get("type") != "instructions"
    ]
