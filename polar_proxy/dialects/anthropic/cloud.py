"""Anthropic Messages as Google Vertex and Amazon Bedrock serve them. The URL says which model, and whether to stream.

    POST .../publishers/anthropic/models/{model}:rawPredict, :streamRawPredict       (Vertex)
    POST /model/{model}/invoke, /model/{model}/invoke-with-response-stream            (Bedrock)

Bodies and answers are those of `POST /v1/messages`, except that Bedrock streams in Amazon's binary event stream. Calls
are recorded as `anthropic_messages`.
Source: https://docs.aws.amazon.com/bedrock/latest/userguide/model-parameters-anthropic-claude-messages.html
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import orjson

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Answer, Encoder, ParsedRequest
from polar_proxy.types import Json, SampleEvent

_VERTEX = re.compile(
    r"(?:/v1[a-z0-9]*)?(?:/projects/.+)?/publishers/anthropic/models/(?P<model>[^/:]+)"
    r":(?P<verb>rawPredict|streamRawPredict)"
)
_BEDROCK = re.compile(r"/model/(?P<model>.+)/invoke(?P<stream>-with-response-stream)?")


class AnthropicOnCloud(AnthropicMessages):
    """Anthropic's dialect for one request to Vertex or Bedrock. `model` and `stream` come from the request's URL."""

    def __init__(self, model: str, *, stream: bool, frames: bool) -> None:
        """`frames`: True if a stream is sent as Amazon's binary event stream, not as server-sent events."""
        self.model = model
        self.stream = stream
        self.frames = frames and stream
        if self.frames:
            self.stream_media_type = "application/vnd.amazon.eventstream"
            self.heartbeat = None

    def requested_model(self, body: Json) -> str:
        return self.model

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        parsed = super().parse({**body, "model": self.model, "stream": self.stream}, previous)
        return replace(parsed, encoder=partial(FrameEncoder, make_encoder=parsed.encoder)) if self.frames else parsed


def cloud_route(path: str) -> AnthropicOnCloud | None:
    """Return the dialect for a path (percent-decoded) of Vertex or Bedrock; None for any other path."""
    if (found := _VERTEX.fullmatch(path)) is not None:
        return AnthropicOnCloud(found["model"], stream=found["verb"] == "streamRawPredict", frames=False)
    if (found := _BEDROCK.fullmatch(path)) is not None:
        return AnthropicOnCloud(found["model"], stream=found["stream"] is not None, frames=True)
    return None


@dataclass
class FrameEncoder(Encoder):
    """Wraps each event of Anthropic's stream in a frame of Amazon's event stream."""

    make_encoder: Callable[..., Encoder] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._encoder = self.make_encoder(self.call_id, self.created, sampled=self.sampled)

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        return _frames(self._encoder.feed(request_index, event))

    def end(self, answers: list[Answer]) -> bytes:
        return _frames(self._encoder.end(answers))

    def respond(self, answers: list[Answer]) -> bytes:
        return self._encoder.respond(answers)

    def fail(self, message: str, status: int) -> bytes:
        body = orjson.dumps({"message": message})
        return _frame(body, {":message-type": "exception", ":exception-type": "modelStreamErrorException"})


def _frames(stream: bytes) -> bytes:
    """Convert server-sent events to frames, one frame for each event. The JSON of an event has no line breaks."""
    payloads = (event.partition(b"data: ")[2] for event in stream.split(b"\n\n"))
    headers = {":message-type": "event", ":event-type": "chunk", ":content-type": "application/json"}
    chunks = (orjson.dumps({"bytes": base64.b64encode(payload).decode()}) for payload in payloads if payload)
    return b"".join(_frame(chunk, headers) for chunk in chunks)


def _frame(payload: bytes, headers: dict[str, str]) -> bytes:
    """Return one frame: lengths, their checksum, headers (each of type 7, a string), payload, checksum of all bytes."""
    encoded = b"".join(
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", 7, len(value)) + value.encode()
        for name, value in headers.items()
    )
    lengths = struct.pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    message = lengths + struct.pack(">I", zlib.crc32(lengths)) + encoded + payload
    return message + struct.pack(">I", zlib.crc32(message))
