"""The Responses API over a WebSocket: many requests on one connection, one after the other.

    client   {"type": "response.create", ...the body of POST /v1/responses}
    server   the events of the stream, each in one text message
    server   {"type": "error", "status": ..., "error": {...}} instead of a response with an error status

Promises:

* Each request goes through `RequestHandler.handle`, so it is treated like an HTTP request in every respect: limits,
  retries, recording, and what happens when the client disconnects.
* A refused request leaves the WebSocket open. The server closes it if a message breaks the protocol or a limit, if it
  is idle, or when the server stops.
* A response with `store: false` can be continued on its own WebSocket. This ends when a later response is
  complete, or when a request that continues the response fails. (The API defines it so: after a failure the client
  sends its conversation again.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import orjson

from polar_proxy.dialects.openai_responses.items import response_id
from polar_proxy.dialects.openai_responses.websocket import ResponsesWebSocketDialect
from polar_proxy.engines.passthrough.socket import ProviderWebSocket
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway.handler import RequestHandler
from polar_proxy.gateway.hosted.passthrough import provider_request
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.limits import BodyReservation
from polar_proxy.gateway.http.websocket import CLOSE_SECONDS, TRY_AGAIN_LATER
from polar_proxy.types import new_id

_DIALECT = ResponsesWebSocketDialect()
_FINAL_EVENTS = (b"event: response.completed", b"event: response.incomplete")
"""The types of the events with which a complete answer may end."""


class ResponsesWebSocket:
    """One WebSocket, from the request that opens it to its end."""

    def __init__(
        self, handler: RequestHandler, path: str, path_key: str | None, scope: asgi.Scope, send: asgi.Send
    ) -> None:
        """`path` is the route without the prefix `/s/{path_key}`."""
        self._handler = handler
        self._path = path
        self._path_key = path_key
        self._scope = scope
        self._send = send
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Queue of request bodies. The item None means that no further request is answered."""
        self._close_code: int | None = None
        """The close code to send; None while the server has no reason to close, and None again when the client has
        disconnected."""
        self.gone = asyncio.Event()
        """Set once the client has disconnected."""
        self.answering = False
        """True while a request is answered. It becomes False just before the last event of the answer is sent."""
        self.latest_call: str | None = None
        """Call id of the latest complete answer; None if there is none, or if a request that continues it failed."""

    async def serve(self, receive: asgi.Receive) -> None:
        try:
            headers = asgi.read_headers(self._scope)
            session = await self._handler.session_finder.find(headers, self._path_key, self._scope)
        except RequestError as error:
            await asgi.send_error(asgi.refuse_upgrade(self._send), error, _DIALECT)
            return
        provider = ProviderWebSocket()
        state = {**self._scope.get("state", {}), asgi.PROVIDER_EXCHANGE: provider.exchange}
        self._scope = {**self._scope, "state": state}
        engine = self._handler.router.choose(session, "").passthrough
        try:
            if engine is not None:  # so that an agent whose provider refuses a WebSocket is refused one
                raw = provider_request(self._scope, _DIALECT)
                await provider.open(engine.url_of(raw.host), raw)
        except (RequestError, EngineError) as error:
            await asgi.send_error(asgi.refuse_upgrade(self._send), error, _DIALECT)
            return
        await receive()  # websocket.connect
        await self.send({"type": "websocket.accept"})
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(receive, session.session_id))
                await self._answer_requests()
                reader.cancel()
        except asyncio.CancelledError:
            pass  # a server that stops cancels requests after its grace period
        finally:
            await provider.close()
        if self._close_code is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.send({"type": "websocket.close", "code": self._close_code})

    async def _answer_requests(self) -> None:
        await self.send({"type": asgi.WEBSOCKET_IDLE})
        while (body := await self._requests.get()) is not None:
            request = _WebSocketRequest(self, body)
            resumable = () if self.latest_call is None else (self.latest_call,)
            if any(response_id(call).encode() in body for call in resumable):
                self.latest_call = None  # until the end of the answer sets it again
            await self._handler.handle(
                _DIALECT, self._path, self._path_key, self._scope, request.receive, request.send, resumable=resumable
            )
            request.end()
            if not self.answering:
                await self.send({"type": asgi.WEBSOCKET_IDLE})

    async def _read(self, receive: asgi.Receive, session_id: str) -> None:
        """Read the client's messages until it disconnects. A request is refused while another one is answered."""
        while not self.gone.is_set():
            try:
                with self._handler.bodies.reserve(session_id) as reservation:
                    message = await _receive_whole(receive, reservation)
            except RequestError as error:
                await self._close(TRY_AGAIN_LATER, error)
                break
            if message["type"] == "websocket.disconnect":
                self._close_code = None
                self.gone.set()
            elif message["type"] == asgi.WEBSOCKET_CLOSING:
                await self._close(message["code"], message["error"])
            elif "text" not in message:
                await self._refuse(RequestError("A request must be a text message; this one is binary."))
            elif self.answering:
                text = "The last request on this WebSocket is still being answered. Wait, or open another WebSocket."
                await self._refuse(RequestError(text, code="response_in_progress"))
            else:
                self.answering = True
                self._requests.put_nowait(message["text"])
        self._requests.put_nowait(None)

    async def _refuse(self, error: RequestError) -> None:
        await self.send_text(_error_event(error.status, _DIALECT.error_body(error, new_id("req"))))
        if not self.answering:
            await self.send({"type": asgi.WEBSOCKET_IDLE})

    async def _close(self, code: int, error: RequestError | None) -> None:
        """Take no more requests, and close the WebSocket when the present request is answered.

        With an `error`, a request that is being answered ends at once, as if the client had disconnected.
        """
        self._close_code = code
        if error is None:
            self._requests.put_nowait(None)
        else:
            await self._refuse(error)
            self.gone.set()

    async def send(self, message: Any) -> None:
        try:
            await self._send(message)
        except OSError:
            self.gone.set()

    async def send_text(self, text: bytes) -> None:
        await self.send({"type": "websocket.send", "text": text.decode()})


class _WebSocketRequest:
    """A request on a WebSocket, in the form of an HTTP request: `receive` returns its body, `send` takes its answer."""

    def __init__(self, websocket: ResponsesWebSocket, body: bytes) -> None:
        self._websocket = websocket
        self._body: bytes | None = body
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._ended = False

    async def receive(self) -> Any:
        if self._body is None:
            await self._websocket.gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        if not message.get("more_body", False):
            self.end()  # the client may send its next request as soon as it has read the last event
        if self._status != 200:
            await self._websocket.send_text(_error_event(self._status, message["body"], self._headers))
            return
        for event in message["body"].split(b"\n\n"):  # there are no line breaks inside an event's JSON
            name, _, data = event.partition(b"\ndata: ")
            if name in _FINAL_EVENTS and b"x-polar-call-id" in self._headers:
                self._websocket.latest_call = self._headers[b"x-polar-call-id"].decode()
            if data:
                await self._websocket.send_text(data)

    def end(self) -> None:
        """Let the WebSocket take its next request. Safe to call more than once."""
        if not self._ended:
            self._ended, self._websocket.answering = True, False


async def _receive_whole(receive: asgi.Receive, reservation: BodyReservation) -> Any:
    """Return the next message, after reserving memory for each received piece. Raises RequestError if the memory for
    requests is used up."""
    while (message := await receive())["type"] == asgi.WEBSOCKET_PIECE:
        reservation.take(message["size"])
    return message


def _error_event(status: int, body: bytes, headers: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return the event for an HTTP response with an error status."""
    try:
        error = {**orjson.loads(body)["error"]}
    except (ValueError, KeyError, TypeError):  # not in OpenAI's format, such as the page of a provider's firewall
        refusal = RequestError(body.decode(errors="replace"), status=status)
        error = orjson.loads(_DIALECT.error_body(refusal, new_id("req")))["error"]
    event = {"type": "error", "status": status, "error": error}
    if headers is not None and (after := headers.get(b"retry-after")) is not None:
        # The schema has the headers inside the error; Codex reads them from the event itself.
        event["headers"] = error["headers"] = {"retry-after": after.decode("latin-1")}
    return orjson.dumps(event)
