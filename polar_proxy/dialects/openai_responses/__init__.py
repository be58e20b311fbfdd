"""OpenAI Responses."""

from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses, ResponsesTokenCount

__all__ = ["OpenAIResponses", "ResponsesTokenCount"]
