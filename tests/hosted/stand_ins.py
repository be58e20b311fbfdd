"""The stand-ins of the providers by name, and the engine for one."""

from __future__ import annotations

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
