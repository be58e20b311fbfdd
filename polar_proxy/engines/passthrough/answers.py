"""Read a provider's answer while it is passed on: split the body, choose the decoder, find the end."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence

import orjson

from polar_proxy.engines.hosted.anthropic import MessageDecoder
from polar_proxy.engines.hosted.base import HostedDecoder
from polar_proxy.engines.hosted.google import ContentDecoder
from polar_proxy.engines.openai_client import AnswerDecoder
from polar_proxy.engines.openai_stream import ChunkDecoder, SseDecoder, parse_json
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.provider_calls import ProviderRequest
from polar_proxy.types import EngineRequest, Json, Message, SampleEvent, ToolCall, ToolDelta, Usage

EVENT_STREAM, AWS_EVENT_STREAM = "text/event-stream", "application/vnd.amazon.eventstream"
_FINAL_TYPES = frozenset(
    {"message_delta", "message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)


def make_decoder(raw: ProviderRequest, request: EngineRequest) -> AnswerDecoder:
    """Return the decoder of an answer in the dialect of the request."""
    name = f"The provider at {raw.host}"
    if raw.dialect == "anthropic_messages":
        return MessageDecoder(name, request.model)
    if raw.dialect == "google_generate_content":
        return ContentDecoder(name, request.model, request.sampling.n)
    if raw.dialect == "openai_responses":
        return ResponseDecoder(name, raw.read_items)
    return ChunkDecoder(request.sampling, name, expect_ids=False)


def is_end(chunk: Json) -> bool:
    """Return whether this object of a stream completes the answer.

    The agent may act on a complete answer, although further objects may follow, such as the token counts.
    """
    choices = chunk.get("choices") or chunk.get("candidates") or ()
    return chunk.get("type") in _FINAL_TYPES or any(
        choice.get("finish_reason") or choice.get("finishReason") for choice in choices
    )


def error_in(chunk: Json) -> Json | None:
    """Return the error that an object of a stream reports, or None."""
    error = chunk.get("error")
    if isinstance(error, dict):
        return error
    response = chunk.get("response")
    if chunk.get("type") == "response.failed" and isinstance(response, dict):
        return response.get("error") or {"message": "the response failed"}
    return chunk if chunk.get("type") == "error" else None


class BodyReader:
    """Splits a response body (server-sent events, Amazon's event stream or JSON) into JSON objects as it arrives."""

    def __init__(self, headers: dict[bytes, bytes], host: str) -> None:
        """`headers`: the headers of the response, with names in lower case. A compressed body is not read, so `feed`
        returns no objects."""
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        self._lines = SseDecoder(host) if content_type.startswith(EVENT_STREAM) else None
        self._frames = content_type.startswith(AWS_EVENT_STREAM)
        self._compressed = b"content-encoding" in headers
        self._host = host
        self._rest = b""

    def feed(self, data: bytes, *, last: bool) -> list[Json]:
        """Return the objects that `data` completes. `last`: the body ends with `data`.

        An unstreamed body is decoded as a whole at its end. Raises EngineError for malformed content.
        """
        if self._compressed:
            return []
        if self._lines is not None:
            return [event for event in self._lines.feed(data) if isinstance(event, dict)]
        self._rest += data
        if self._frames:
            return self._read_frames()
        return self._read_body() if last else []

    def _read_body(self) -> list[Json]:
        """Return the object of an unstreamed body, or the items of its array."""
        value = parse_json(self._rest, self._host)
        return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]

    def _read_frames(self) -> list[Json]:
        """Return the events in the complete frames of Amazon's event stream.

        A frame consists of its total length, the length of its headers, a checksum of both lengths, the headers, a
        payload, and a checksum of the whole. The payload of a chunk holds the event in base64.
        """
        found = []
        while len(self._rest) >= 12:
            total, headers = struct.unpack(">II", self._rest[:8])
            if total < 16 or headers > total - 16:
                raise EngineError(f"The provider at {self._host} sent a malformed event stream.")
            if len(self._rest) < total:
                break
            payload, self._rest = self._rest[12 + headers : total - 4], self._rest[total:]
            try:
                event = orjson.loads(payload)
                found.append(orjson.loads(base64.b64decode(event["bytes"])) if "bytes" in event else {"error": event})
            except (TypeError, ValueError) as error:
                raise EngineError(f"The provider at {self._host} sent a malformed event: {error}.") from error
        return found


class ResponseDecoder(HostedDecoder):
    """Turns a response object of the Responses API, or the events of its stream, into `SampleEvent`s.

    Text becomes events as it arrives. Reasoning and tool calls become one event at the end, because they are read from
    the finished output items. The argument `read_items` is the function that also reads such items in requests.
    """

    def __init__(self, name: str, read_items: Callable[[list[Json]], Sequence[Message]]) -> None:
        super().__init__(name)
        self._read_items = read_items
        self._items: dict[int, Json] = {}
        self._response: Json | None = None
        self._text_sent = False

    def events(self, chunk: Json) -> list[SampleEvent]:
        kind = chunk.get("type")
        if kind == "response.output_text.delta":
            self._text_sent = True
            return [SampleEvent(text=chunk["delta"])]
        if kind == "response.created":
            return [SampleEvent(response_id=_response_id(chunk.get("response", {})))]
        if kind == "response.output_item.done":
            self._items[chunk["output_index"]] = chunk["item"]
        elif kind in ("response.completed", "response.incomplete"):
            self._response = chunk["response"]
        elif chunk.get("object") == "response":
            self._response = chunk
            return [SampleEvent(response_id=_response_id(chunk))]
        return []

    def end(self) -> list[SampleEvent]:
        response = self._response
        if response is None:
            raise EngineError(f"{self._name} broke off in the middle of its answer.")
        if response.get("status") in ("queued", "in_progress"):
            raise EngineError(
                f"{self._name} makes the answer in the background, so Polar does not see it. To record the answer, "
                "leave out `background`."
            )
        # ChatGPT's backend leaves the output of the last event empty.
        items = response.get("output") or [self._items[index] for index in sorted(self._items)]
        try:
            messages = self._read_items(items) if items else ()
        except RequestError as error:
            raise EngineError(f"{self._name} sent an answer that Polar cannot read: {error}") from error
        answers = [message for message in messages if message.role == "assistant"]
        calls = [call for message in answers for call in message.tool_calls]
        text = "" if self._text_sent else "".join(str(message.content or "") for message in answers)
        deltas = (ToolDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(calls))
        cut = (response.get("incomplete_details") or {}).get("reason")
        finish = {"max_output_tokens": "length", "content_filter": "content_filter"}.get(str(cut))
        return [
            SampleEvent(
                text=text,
                reasoning="".join(message.reasoning or "" for message in answers),
                tool_calls=tuple(deltas),
                finish_reason=finish or ("tool_calls" if calls else "stop"),
                usage=_usage(response),
                response_id=_response_id(response),
                response_items=_item_ids(items, calls),
            )
        ]


def _response_id(response: Json) -> str | None:
    """Return the provider's id of a response. It is recorded with the first event, because a response that breaks off
    can be retrieved by its id."""
    identity = response.get("id")
    return identity if isinstance(identity, str) else None


def _item_ids(items: Sequence[Json], calls: Sequence[ToolCall]) -> Json:
    """Return a mapping from the id of each output item to its name in the record (see `CallRecord.response_items`)."""
    places: Json = {call.id: f"fc_{number}" for number, call in enumerate(calls)}
    places |= {"message": "msg_0", "reasoning": "rs_0"}
    found = {}
    for item in items:
        kind = item.get("type")
        key = kind if kind in ("message", "reasoning") else item.get("call_id", item.get("id"))
        if isinstance(item.get("id"), str) and key in places:
            found[item["id"]] = places[key]
    return found


def _usage(response: Json) -> Usage | None:
    usage = response.get("usage") or {}
    if not isinstance(usage.get("input_tokens"), int) or not isinstance(usage.get("output_tokens"), int):
        return None
    tier = response.get("service_tier")
    return Usage(
        input_tokens=usage["input_tokens"],
        output_tokens=usage["output_tokens"],
        cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
        reasoning_tokens=(usage.get("output_tokens_details") or {}).get("reasoning_tokens"),
        model=response.get("model"),
        service_tier=None if tier in (None, "auto", "default") else tier,
    )
