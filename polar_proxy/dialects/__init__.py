"""Wire formats: one module a dialect, all behind `Dialect` (base.py)."""

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages, AnthropicTokenCount
from polar_proxy.dialects.base import (
    Answer,
    Dialect,
    Encoder,
    ParsedRequest,
    PreviousCall,
    TokenCount,
    assistant_message,
)
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses, ResponsesTokenCount
from polar_proxy.dialects.registry import get_dialect, recorded_request

__all__ = [
    "Answer",
    "AnthropicMessages",
    "AnthropicTokenCount",
    "Dialect",
    "Encoder",
    "OpenAIChat",
    "OpenAICompletions",
    "OpenAIResponses",
    "ParsedRequest",
    "PreviousCall",
    "ResponsesTokenCount",
    "TokenCount",
    "assistant_message",
    "get_dialect",
    "recorded_request",
]
