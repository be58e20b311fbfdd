"""The WebSocket between Polar and a provider. For each WebSocket of an agent, Polar opens one to the provider."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from polar_proxy.engines.passthrough.answers import is_end
from polar_proxy.engines.passthrough.engine import headers_to_send
from polar_proxy.errors import EngineError, ProviderError
from polar_proxy.provider_calls import ProviderPiece, ProviderRequest
from polar_proxy.types import Json

_OPEN_SECONDS = 30.0


class _Connect(connect):
    """A connection attempt that follows no redirect, so that the agent's key is sent to no other host."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class ProviderWebSocket:
    """A WebSocket to a provider, one for each WebSocket of an agent. Call `close` when the agent's WebSocket ends.

    `open` connects this WebSocket. If `open` was not called, the first `exchange` does so.
    """

    def __init__(self) -> None:
        self._connection: ClientConnection | None = None
        self._url = ""

    async def open(self, url: str, raw: ProviderRequest) -> ClientConnection:
        """Return a connection to the provider's server at `url`. A connection to another URL is closed first.

        Raises ProviderError if the provider refuses, EngineError if it cannot be reached, RequestError if the agent
        sent a key of Polar.
        """
        if self._connection is not None and self._url == url:
            return self._connection
        await self.close()
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers_to_send(raw)]
        try:
            connection = await _Connect(
                "ws" + url.removeprefix("http") + raw.target,
                additional_headers=headers,
                user_agent_header=None,
                compression=None,
                max_size=None,
                open_timeout=_OPEN_SECONDS,
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as error:
            response = error.response
            body = bytes(response.body or b"")
            raise ProviderError(f"{raw.host} refused the WebSocket.", status=response.status_code, body=body) from error
        except (OSError, WebSocketException) as error:
            raise EngineError(f"{raw.host} cannot be reached: {error or type(error).__name__}.") from error
        self._connection, self._url = connection, url
        return connection

    async def exchange(self, url: str, raw: ProviderRequest) -> AsyncIterator[ProviderPiece]:
        """Send a request, and yield the messages of its answer. Raises as `open` does.

        Each message is written as a server-sent event, which is the format that the gateway's WebSocket reads.
        """
        connection = await self.open(url, raw)
        yield ProviderPiece(b"", headers=((b"content-type", b"text/event-stream"),))
        try:
            await connection.send(raw.body.decode())
            while True:
                message = await connection.recv()
                data = message.encode() if isinstance(message, str) else message
                event = _object_in(data)
                name = str(event.get("type", "message")).encode()
                yield ProviderPiece(b"event: " + name + b"\ndata: " + data + b"\n\n")
                if is_end(event):
                    return
        except (ConnectionClosed, OSError) as error:
            raise EngineError(f"The WebSocket to {raw.host} broke off: {error}.") from error

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


def _object_in(message: bytes) -> Json:
    """Return a message decoded from JSON; {} if it is not a JSON object. (Such messages, too, reach the agent.)"""
    try:
        value: object = orjson.loads(message)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
