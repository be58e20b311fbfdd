"""Wire formats of model providers. Each dialect implements `Dialect` (base.py)."""

from polar_proxy.dialects.answer import Answer, AnswerChoice
from polar_proxy.dialects.anthropic import AnthropicMessages, AnthropicTokenCount
from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest, PreviousCall, TokenCount
from polar_proxy.dialects.google import GoogleGenerateContent, GoogleTokenCount
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses import OpenAIResponses, ResponsesTokenCount
from polar_proxy.dialects.registry import get_dialect, parse_recorded, recorded_request

__all__ = [
    "Answer",
    "AnswerChoice",
    "AnthropicMessages",
    "AnthropicTokenCount",
    "Dialect",
    "Encoder",
    "GoogleGenerateContent",
    "GoogleTokenCount",
    "OpenAIChat",
    "OpenAICompletions",
    "OpenAIResponses",
    "ParsedRequest",
    "PreviousCall",
    "ResponsesTokenCount",
    "TokenCount",
    "get_dialect",
    "parse_recorded",
    "recorded_request",
]
