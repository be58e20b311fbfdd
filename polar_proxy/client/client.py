"""`Client` (blocking) and `AsyncClient` (asyncio): the same methods over two kinds of connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Self, TypeVar

import httpx

from polar_proxy.api_models import API_PREFIX, JobDetail
from polar_proxy.client.requests import MAX_TRIES, ApiCall, ApiStream, RetryBudget, StreamReader
from polar_proxy.client.routes import ApiMethods

T = TypeVar("T")


def _base_url(url: str) -> str:
    """Return the root URL of a server. The given URL may end with the API's path."""
    return url.rstrip("/").removesuffix(API_PREFIX)


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


class Client(ApiMethods):
    """The blocking client, for one thread at a time: `with Client("http://127.0.0.1:8399", key) as polar: ...`.

    Every method raises an `ApiError` if the server refuses, and `UnreachableError` if no response arrives.
    Idempotent requests are tried up to `tries` times with growing pauses: 5 tries last some seconds, 12 about a minute.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = MAX_TRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._tries = tries
        self._http = httpx.Client(base_url=_base_url(url), headers=_headers(key), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: ApiCall[T]) -> T:
        """Send one request, with retries, and return its parsed response."""
        budget = RetryBudget(self._tries, call.idempotent)
        while True:
            try:
                response = self._http.send(call.request(self._http))
                if (pause := budget.pause_after_response(response)) is None:
                    return call.read(response.content)
            except httpx.TransportError as error:
                pause = budget.pause_after_error(error)
            time.sleep(pause)

    def stream(self, stream: ApiStream[T]) -> Iterator[T]:
        """Yield the values of a stream as they arrive, and reconnect if the connection breaks."""
        reader = StreamReader(stream, self._tries)
        while not reader.decoder.ended:
            time.sleep(reader.pause)
            try:
                with contextlib.closing(self._http.send(reader.request(self._http), stream=True)) as response:
                    if response.is_error:
                        response.read()
                    if reader.opened(response):
                        for data in response.iter_bytes():
                            yield from reader.feed(data)
                        reader.decoder.response_ended()
            except httpx.TransportError as error:
                reader.connection_lost(error)

    def wait(self, job_id: str) -> JobDetail:
        """Block until the job has ended, and return it."""
        for event in self.events(job_id):
            if event.event == "end":
                break
        return self.job(job_id)


class AsyncClient(ApiMethods):
    """`Client` for asyncio: await the methods, read streams by `async for`. Any number of asyncio tasks may use it."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = MAX_TRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._tries = tries
        self._http = httpx.AsyncClient(base_url=_base_url(url), headers=_headers(key), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: ApiCall[T]) -> T:
        budget = RetryBudget(self._tries, call.idempotent)
        while True:
            try:
                response = await self._http.send(call.request(self._http))
                if (pause := budget.pause_after_response(response)) is None:
                    return call.read(response.content)
            except httpx.TransportError as error:
                pause = budget.pause_after_error(error)
            await asyncio.sleep(pause)

    async def stream(self, stream: ApiStream[T]) -> AsyncIterator[T]:
        reader = StreamReader(stream, self._tries)
        while not reader.decoder.ended:
            await asyncio.sleep(reader.pause)
            try:
                sent = await self._http.send(reader.request(self._http), stream=True)
                async with contextlib.aclosing(sent) as response:
                    if response.is_error:
                        await response.aread()
                    if reader.opened(response):
                        async for data in response.aiter_bytes():
                            for value in reader.feed(data):
                                yield value
                        reader.decoder.response_ended()
            except httpx.TransportError as error:
                reader.connection_lost(error)

    async def wait(self, job_id: str) -> JobDetail:
        async for event in self.events(job_id):
            if event.event == "end":
                break
        return await self.job(job_id)
