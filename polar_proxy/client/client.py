"""The two clients: the same routes, over a blocking connection and over asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self, TypeVar

import httpx

from polar_proxy.api_models import API_PREFIX, JobDetail
from polar_proxy.client.requests import MAX_TRIES, ApiCall, ApiStream, RetryBudget, StreamReader
from polar_proxy.client.routes import ApiMethods

T = TypeVar("T")


def _base(url: str) -> str:
    """Without the path of the API, which somebody may have copied along."""
    return url.rstrip("/").removesuffix(API_PREFIX)


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


class Client(ApiMethods):
    """`with Client("http://127.0.0.1:8399", key) as polar: polar.job(...)`. One thread at a time.

    Every method raises `ApiError` (its subclass says what it is) for what the server refuses and `UnreachableError`
    where no answer came. What may be said twice is tried up to `tries` times, with growing pauses: 5 are some seconds,
    12 about a minute.
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
        self._http = httpx.Client(base_url=_base(url), headers=_headers(key), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: ApiCall[T]) -> T:
        """Ask, and ask again where that is right."""
        tries = RetryBudget(self._tries, call.repeatable)
        while True:
            reply: httpx.Response | httpx.TransportError
            try:
                reply = self._http.send(call.request(self._http))
            except httpx.TransportError as error:
                reply = error
            pause = tries.pause(reply)
            if pause is None and isinstance(reply, httpx.Response):
                return call.read(reply.content)
            time.sleep(pause or 0.0)

    def stream(self, stream: ApiStream[T]) -> Iterator[T]:
        """The values of a stream, as they come."""
        reading = StreamReader(stream, self._tries)
        while not reading.ended:
            time.sleep(reading.pause)
            try:
                with contextlib.closing(self._http.send(reading.request(self._http), stream=True)) as response:
                    if response.is_error:
                        response.read()
                    if reading.opened(response):
                        for data in response.iter_bytes():
                            yield from reading.feed(data)
                        reading.closed()
            except httpx.TransportError as error:
                reading.lost(error)

    def wait(self, job_id: str) -> JobDetail:
        """The job, once it has ended."""
        for event in self.events(job_id):
            if event.event == "end":
                break
        return self.job(job_id)


class AsyncClient(ApiMethods):
    """As `Client`, every method awaited, streams by `async for`. Any number of tasks at a time."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        tries: int = MAX_TRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._tries = tries
        self._http = httpx.AsyncClient(base_url=_base(url), headers=_headers(key), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: ApiCall[T]) -> T:
        """Ask, and ask again where that is right."""
        tries = RetryBudget(self._tries, call.repeatable)
        while True:
            reply: httpx.Response | httpx.TransportError
            try:
                reply = await self._http.send(call.request(self._http))
            except httpx.TransportError as error:
                reply = error
            pause = tries.pause(reply)
            if pause is None and isinstance(reply, httpx.Response):
                return call.read(reply.content)
            await asyncio.sleep(pause or 0.0)

    async def stream(self, stream: ApiStream[T]) -> AsyncIterator[T]:
        """The values of a stream, as they come."""
        reading = StreamReader(stream, self._tries)
        while not reading.ended:
            await asyncio.sleep(reading.pause)
            try:
                sent = await self._http.send(reading.request(self._http), stream=True)
                async with contextlib.aclosing(sent) as response:
                    if response.is_error:
                        await response.aread()
                    if reading.opened(response):
                        async for data in response.aiter_bytes():
                            for value in reading.feed(data):
                                yield value
                        reading.closed()
            except httpx.TransportError as error:
                reading.lost(error)

    async def wait(self, job_id: str) -> JobDetail:
        """The job, once it has ended."""
        async for event in self.events(job_id):
            if event.event == "end":
                break
        return await self.job(job_id)
