"""Stand-ins for the APIs of OpenAI, Anthropic and Google: they validate requests by the types of the official SDKs.

A request is refused if the SDK's types do not describe it, or if it lacks the right key. Scripted answers are built
with the SDK's own response models. Signed answers of Anthropic and Google must come back with their signatures in the
next request that has the result of their tool call, as the real APIs demand.
"""

from tests.fakes.providers.anthropic import AnthropicProvider
from tests.fakes.providers.base import KEY, Provider, Refused, Scripted
from tests.fakes.providers.google import GoogleProvider
from tests.fakes.providers.openai import OpenAIProvider

__all__ = ["KEY", "AnthropicProvider", "GoogleProvider", "OpenAIProvider", "Provider", "Refused", "Scripted"]
