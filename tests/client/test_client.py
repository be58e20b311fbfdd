"""The clients against a scripted server: typed errors, retries, broken streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from polar_proxy import client as c
from polar_proxy.api_models import Event, JobRequest, LeaseRequest, RewardRequest
from polar_proxy.client.inprocess import AsgiMessage, InProcessTransport
from polar_proxy.errors import StoreError, UsageError

Reply = httpx.Response | Exception
FEED = {"depth": {"waiting": 2}, "dropped_reasons": {}}


class Script:
    """A transport that gives these replies in turn and records the requests."""

    def __init__(self, *replies: Reply) -> None:
        self.replies, self.requests = list(replies), list[httpx.Request]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, httpx.TransportError):
            reply.request = request
        if isinstance(reply, Exception):
            raise reply
        return reply

    def client(self, key: str | None = "polar-admin-1") -> c.Client:
        return c.Client("http://polar.test/", key, transport=httpx.MockTransport(self))


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces; an exception among them breaks the connection."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace sleeping; return the seconds that the clients would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    async def instead(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", instead)
    return slept


def refusal(status: int, code: str, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": "Because.", **more}})


@pytest.mark.parametrize(
    ("status", "code", "kind", "also"),
    [
        (400, "bad_request", c.BadRequestError, UsageError),
        (401, "unauthorised", c.UnauthorisedError, UsageError),
        (403, "forbidden", c.ForbiddenError, UsageError),
        (404, "not_found", c.NotFoundError, UsageError),
        (409, "pause_timed_out", c.ConflictError, UsageError),
        (409, "lease_lost", c.LeaseLostError, StoreError),
        (422, "invalid", c.BadRequestError, UsageError),
        (503, "unavailable", c.UnavailableError, c.ApiError),
        (418, "teapot", c.ApiError, c.ApiError),
    ],
)
def test_refusals_are_typed(status: int, code: str, kind: type[c.ApiError], also: type[Exception]) -> None:
    script = Script(refusal(status, code, detail=[1]))
    with pytest.raises(kind, match=r"^Because\.$") as caught, script.client() as polar:
        polar.feed()
    assert isinstance(caught.value, also)
    assert (caught.value.status, caught.value.code, caught.value.detail) == (status, code, [1])
    assert len(script.requests) == 1


def test_errors_of_a_proxy_are_reported_as_received() -> None:
    for body in (b"<html>bad gateway</html>", b'{"detail": "no"}', b"[1]"):
        with pytest.raises(c.ApiError, match="answers 502: ") as caught:
            Script(httpx.Response(502, content=body)).client().feed()
        assert caught.value.code == "http_502"


def test_sends_the_key_and_accepts_a_url_with_the_api_path(pauses: list[float]) -> None:
    script = Script(httpx.Response(200, json=FEED), httpx.Response(200, json=FEED))
    assert script.client().feed().depth == {"waiting": 2}
    c.Client("http://polar.test/api/v1/", transport=httpx.MockTransport(script)).feed()
    assert [str(request.url) for request in script.requests] == ["http://polar.test/api/v1/feed"] * 2
    assert [request.headers.get("authorization") for request in script.requests] == ["Bearer polar-admin-1", None]


def test_ids_are_quoted_as_one_path_segment() -> None:
    script = Script(refusal(404, "not_found"))
    with pytest.raises(c.NotFoundError):
        script.client().job("../feed?x=1")
    assert script.requests[0].url.raw_path == b"/api/v1/jobs/..%2Ffeed%3Fx%3D1"


def test_retries_of_a_submission_have_the_same_key(pauses: list[float]) -> None:
    """A lost response, a busy server and a refused connection: each try has the same key and body."""
    job = {"job_id": "job_1", "status": "open", "label": None, "priority": 0, "groups": 1, "rollouts": {"queued": 1}}
    job |= {"created_at": 1.0, "ended_at": None, "new": False, "of_a_newer_server": 1}
    busy = httpx.Response(503, headers={"retry-after": "3"}, json={"error": {"code": "unavailable", "message": "!"}})
    script = Script(httpx.ReadError("reset"), busy, httpx.ConnectError("refused"), httpx.Response(200, json=job))
    assert script.client().submit(JobRequest(task="swe-task")).job_id == "job_1"
    keys = {request.headers["idempotency-key"] for request in script.requests}
    assert (len(script.requests), len(keys)) == (4, 1)
    assert [request.content for request in script.requests] == [b'{"task":"swe-task"}'] * 4
    assert pauses[1] == 3.0
    assert 0 < pauses[0] < pauses[2]
    script = Script(httpx.Response(200, json=job))
    script.client().submit(JobRequest(task="swe-task"), idempotency_key="mine")
    assert script.requests[0].headers["idempotency-key"] == "mine"


def test_requests_that_are_not_idempotent_are_retried_only_without_a_connection(pauses: list[float]) -> None:
    for call in (
        lambda polar: polar.reward(RewardRequest(rollout_id="roll_1", value=1.0, source="me")),
        lambda polar: polar.lease(LeaseRequest(consumer="me")),
    ):
        script = Script(httpx.ReadError("reset"))
        with pytest.raises(c.UnreachableError, match=r"No answer from http://polar\.test: reset"):
            call(script.client())
    script = Script(httpx.ConnectError("refused"), httpx.Response(200, json={"leases": [], "dropped": ["group_1"]}))
    assert script.client().lease(LeaseRequest(consumer="me")).dropped == ["group_1"]


def test_gives_up_after_the_last_try(pauses: list[float]) -> None:
    script = Script(*[httpx.ConnectError("refused")] * 9)
    with pytest.raises(c.UnreachableError, match="Is `polar serve` running"):
        script.client().feed()
    assert len(script.requests) == 5


def test_a_long_poll_has_a_longer_timeout() -> None:
    script = Script(httpx.Response(200, json={"leases": [], "dropped": []}))
    script.client().lease(LeaseRequest(consumer="me", wait=200))
    assert script.requests[0].extensions["timeout"]["read"] > 200


EVENTS = [
    b'id: 1\nevent: stage\ndata: {"n": 1}\n\n',
    b'id: 2\nevent: group\ndata: {"n": 2}\n\n',
    b"id: 3\nevent: end\n",
]


def scripted_events() -> Script:
    """Break in the second event, refuse a connection, end a response early, then complete the stream."""
    return Script(
        httpx.Response(200, stream=Body(EVENTS[0], EVENTS[1][:20], httpx.ReadError("reset"))),
        httpx.ConnectError("refused"),
        httpx.Response(200, stream=Body(EVENTS[1])),
        httpx.Response(200, stream=Body(EVENTS[2], b"data: {}\n\n")),
    )


def check_events(found: list[Event], script: Script) -> None:
    assert [(event.event, event.data.get("n")) for event in found] == [("stage", 1), ("group", 2), ("end", None)]
    assert [request.headers.get("last-event-id") for request in script.requests] == ["0", "1", "1", "2"]
    assert {request.url.query for request in script.requests} == {b"job=job_1"}


def test_events_continue_after_lost_connections(pauses: list[float]) -> None:
    script = scripted_events()
    check_events(list(script.client().events("job_1", after="0")), script)
    assert all(pause > 0 for pause in pauses[1:])


async def test_events_continue_after_lost_connections_asynchronously(pauses: list[float]) -> None:
    script = scripted_events()
    async with c.AsyncClient("http://polar.test", "k", transport=httpx.MockTransport(script)) as polar:
        check_events([event async for event in polar.events("job_1", after="0")], script)


def test_a_refused_stream_raises_a_typed_error() -> None:
    with pytest.raises(c.ForbiddenError, match="Because"):
        next(Script(refusal(403, "forbidden")).client().events())


def test_a_broken_stream_of_rows_is_not_retried(pauses: list[float]) -> None:
    script = Script(
        httpx.ConnectError("refused"),
        httpx.Response(200, stream=Body(b'{"n": 1}\n{"n"', b': 2}\n{"n": 3', httpx.RemoteProtocolError("too short"))),
    )
    found = []
    with pytest.raises(c.UnreachableError, match="broke off: too short"):
        found += [row["n"] for row in script.client().group_trajectories("group_1", all_grades=True)]
    rows = script.client().trajectory("roll_1")
    script.replies = [httpx.Response(200, stream=Body(b'{"n": 1}\n', b'{"n": 2}\n'))]
    assert [row["n"] for row in rows] == [1, 2]
    assert script.requests[1].url.query == b"builder=merged&all_grades=true"


async def test_in_process_responses_arrive_in_pieces() -> None:
    started, more = asyncio.Event(), asyncio.Event()

    async def application(scope: AsgiMessage, receive: Callable[[], Any], send: Callable[[AsgiMessage], Any]) -> None:
        if scope["path"].endswith("/feed"):
            raise RuntimeError("a bug")
        assert (await receive())["body"] == b""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": EVENTS[0], "more_body": True})
        started.set()
        await more.wait()
        await send({"type": "http.response.body", "body": EVENTS[2] + b"data: {}\n\n"})

    async with c.AsyncClient("http://in-process", transport=InProcessTransport(application)) as polar:
        events = polar.events("job_1")
        assert (await anext(events)).id == "1"
        assert started.is_set()
        more.set()
        assert [event.event async for event in events] == ["end"]
        with pytest.raises(RuntimeError, match="a bug"):
            await polar.feed()
