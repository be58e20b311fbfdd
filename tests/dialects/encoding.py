"""Runs an engine's events through a dialect's encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from polar_proxy.dialects.base import Answer, Dialect
from polar_proxy.types import Json, SampleEvent


@dataclass(frozen=True)
class Encoded:
    """An answer as a stream and as a single response."""

    before_end: bytes
    """The stream before the call is committed."""
    end: bytes
    """The rest of the stream."""
    response: Json
    """The body for a client that does not stream."""
    answer: Answer

    @property
    def stream(self) -> bytes:
        return self.before_end + self.end


def gather(events: Sequence[SampleEvent]) -> Answer:
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


def encode(dialect: Dialect, body: Json, events: Sequence[SampleEvent]) -> Encoded:
    parsed = dialect.parse(body)
    encoder = parsed.encoder("call_1", 1)
    answer = gather(events)
    before_end = b"".join(encoder.feed(0, event) for event in events)
    end = encoder.end([answer])
    response = json.loads(parsed.encoder("call_1", 1).respond([answer]))
    return Encoded(before_end, end, response, answer)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Return `text` in pieces, cut at random places."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
