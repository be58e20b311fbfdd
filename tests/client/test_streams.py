"""Decoding of streams, cut into pieces at any places."""

from __future__ import annotations

from itertools import pairwise

import orjson
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.api_models import Event
from polar_proxy.client.requests import EventDecoder, RowDecoder

# `str.splitlines` splits at these characters, which JSON strings may contain.
ODD = "a\u2028b\u0085c\x0b"
WIRE = (
    b": here we are\n\n"
    b'id: 1\nevent: stage\ndata: {"stage": "running", "odd": ' + orjson.dumps(ODD) + b"}\n\n"
    b'event: weather\ndata: {"of": "a newer server"}\r\n\r\n'
    b'id:2\nevent:group\ndata:{"a":\ndata:1}\n\n'
    b": still here\n\n"
    b"id: 3\nevent: end\ndata: {}\n\n"
)
SAID = [
    Event(id="1", event="stage", data={"stage": "running", "odd": ODD}),
    Event(id="2", event="group", data={"a": 1}),
    Event(id="3", event="end", data={}),
]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_events_do_not_depend_on_the_pieces(places: list[int]) -> None:
    decoder = EventDecoder()
    assert [event for piece in cut(WIRE, places) for event in decoder.feed(piece)] == SAID
    assert decoder.ended


@given(st.integers(0, len(WIRE)))
def test_continues_after_the_last_complete_event(place: int) -> None:
    decoder = EventDecoder()
    found = list(decoder.feed(WIRE[:place]))
    if not decoder.ended:
        decoder.response_ended()
        # The server continues after the event that the client names, or from the start.
        named = decoder.headers().get("last-event-id")
        start = {None: 0, "1": WIRE.index(b"event: weather"), "2": WIRE.index(b": still")}[named]
        found += decoder.feed(WIRE[start:])
    assert found == SAID


@given(st.lists(st.integers(0, 10_000), max_size=10))
def test_rows_do_not_depend_on_the_pieces(places: list[int]) -> None:
    rows = [{"text": ODD, "n": n} for n in range(3)]
    wire = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    decoder = RowDecoder()
    assert decoder.resumable
    assert [row for piece in cut(wire, places) for row in decoder.feed(piece)] == rows
    assert not decoder.resumable
    assert not decoder.ended
    decoder.response_ended()
    assert decoder.ended
