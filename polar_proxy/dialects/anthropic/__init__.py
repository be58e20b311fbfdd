"""Anthropic Messages."""

from polar_proxy.dialects.anthropic.dialect import HELLO_RESPONSE, AnthropicMessages

__all__ = ["HELLO_RESPONSE", "AnthropicMessages"]
