"""Token counts of texts for models whose encoding tiktoken knows (OpenAI's), and an estimate for all others.

tiktoken downloads the vocabulary of an encoding at its first use and keeps it on disk. If the download fails, or
tiktoken does not know the model, four bytes of UTF-8 count as one token. All functions block: call them in a thread.

A count of a conversation is an estimate in any case: providers do not publish how they write roles and tools.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import orjson

from polar_proxy.types import ChatRequest, EngineRequest, Message

if TYPE_CHECKING:
    import tiktoken

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
_MESSAGE_MARKS = "<|im_start|>\n<|im_end|>"
"""Added to each message before its tokens are counted, because chat templates put such marks around a message."""


class TokenCounter:
    """Counts the tokens of texts. It logs once if tiktoken cannot load a vocabulary."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encodings: dict[str, tiktoken.Encoding | None] = {}
        """Encoding by model; None if tiktoken does not know the model or cannot load its vocabulary."""

    def count(self, model: str, text: str) -> int:
        """Return tiktoken's count of the tokens. Without an encoding, estimate the number from the text's bytes."""
        encoding = self._encoding(model)
        if encoding is None:
            return -(-len(text.encode()) // BYTES_PER_TOKEN)
        return len(encoding.encode(text, disallowed_special=()))

    def split(self, model: str, text: str) -> list[str] | None:
        """Return the text of each token, in order; None if the model's encoding is not known."""
        encoding = self._encoding(model)
        if encoding is None:
            return None
        ids = encoding.encode(text, disallowed_special=())
        return [encoding.decode_single_token_bytes(token).decode(errors="replace") for token in ids]

    def _encoding(self, model: str) -> tiktoken.Encoding | None:
        with self._lock:
            if model not in self._encodings:
                self._encodings[model] = _load(model)
            return self._encodings[model]


def _load(model: str) -> tiktoken.Encoding | None:
    import tiktoken

    try:
        return tiktoken.encoding_for_model(model)
    except KeyError:  # not a model of OpenAI's
        return None
    except (OSError, ValueError) as error:  # errors of its HTTP client are OSErrors
        log.warning(
            "tiktoken could not load the vocabulary of %s (%s). Token counts that the provider does not report are "
            "estimated as bytes / %d. Connect this machine once, or set TIKTOKEN_CACHE_DIR to a folder with the file",
            model,
            type(error).__name__,
            BYTES_PER_TOKEN,
        )
        return None


def request_text(request: EngineRequest) -> str:
    """Return the text whose tokens are counted for a request: its messages and tools, or its raw prompt.

    Empty for a raw prompt of token ids.
    """
    if not isinstance(request, ChatRequest):
        return request.prompt if isinstance(request.prompt, str) else ""
    parts = [_message_text(message) for message in request.messages]
    if request.tools:
        parts.append(orjson.dumps(request.tools).decode())
    return "".join(parts)


def _message_text(message: Message) -> str:
    content = message.content
    texts = [str(part.get("text", "")) for part in content] if isinstance(content, list) else [content or ""]
    calls = [call.name + call.arguments for call in message.tool_calls]
    return "".join((_MESSAGE_MARKS, message.role, *texts, *calls))
