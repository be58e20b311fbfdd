"""Wire formats: one module a dialect, all behind `Dialect` (base.py)."""

from polar_proxy.dialects.anthropic import AnthropicMessages, AnthropicTokenCount
from polar_proxy.dialects.base import Answer, Dialect, Earlier, Encoder, ParsedRequest, TokenCount, assistant_message
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_responses import OpenAIResponses, ResponsesTokenCount
from polar_proxy.dialects.openai_text import OpenAIText
from polar_proxy.dialects.recorded import by_name, recorded_request

__all__ = [
    "Answer",
    "AnthropicMessages",
    "AnthropicTokenCount",
    "Dialect",
    "Earlier",
    "Encoder",
    "OpenAIChat",
    "OpenAIResponses",
    "OpenAIText",
    "ParsedRequest",
    "ResponsesTokenCount",
    "TokenCount",
    "assistant_message",
    "by_name",
    "recorded_request",
]
