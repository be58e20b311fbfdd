"""Anthropic Messages."""

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages

__all__ = ["AnthropicMessages"]
