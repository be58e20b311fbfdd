"""OpenAI Responses."""

from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses

__all__ = ["OpenAIResponses"]
