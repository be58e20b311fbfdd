"""The stand-ins of the providers by name, and the engine for one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from polar_proxy.engines.hosted.anthropic import AnthropicEngine
from polar_proxy.engines.hosted.base import HostedEngine
from polar_proxy.engines.hosted.google import GoogleEngine
from polar_proxy.engines.hosted.openai import OpenAIEngine
from tests.fakes.providers import KEY, AnthropicProvider, GoogleProvider, OpenAIProvider, Provider

PROVIDERS: dict[str, type[Provider]] = {
    "openai": OpenAIProvider,
    "anthropic": AnthropicProvider,
    "google": GoogleProvider,
}
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
providers = pytest.mark.parametrize("provider", PROVIDERS)


def engine_of(api: Provider) -> HostedEngine:
    if isinstance(api, OpenAIProvider):
        return OpenAIEngine(api.url, model=api.model, api_key=KEY, official=True)
    if isinstance(api, AnthropicProvider):
        return AnthropicEngine(api.url, model=api.model, api_key=KEY)
    return GoogleEngine(api.url, model=api.model, api_key=KEY)


@contextlib.contextmanager
def running(api: Provider) -> Iterator[None]:
    """Run the stand-in in a thread with a loop of its own, for commands that run their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(api.__aenter__(), loop).result(30)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(api.__aexit__(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
