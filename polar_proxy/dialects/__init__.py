"""Wire formats: one module a dialect, all behind `Dialect` (base.py)."""

from polar_proxy.dialects.base import Answer, Dialect, Encoder, ParsedRequest, assistant_message
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_text import OpenAIText

__all__ = ["Answer", "Dialect", "Encoder", "OpenAIChat", "OpenAIText", "ParsedRequest", "assistant_message"]
