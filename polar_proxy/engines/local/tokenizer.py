"""Render and encode conversations, and decode sampled token ids.

Messages are prepared for the chat template in the same way as in vLLM. Invariant of streams: the texts of a stream,
joined, are the decoding of all its ids without special tokens, up to the first stop string.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from polar_proxy.engines.base import uses_tools
from polar_proxy.engines.chat_template import template_message
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, Reasoning, reasoning_kind
from polar_proxy.engines.stop_strings import StopStrings
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message

_SHOWN = (THINK, END_THINK, CALL, END_CALL)
"""Tokens that some tokenizers mark as special, but whose text the answer parser needs."""


class ChatTokenizer:
    """A model's tokenizer and chat template; thread-safe. `tokenizer` is a fast tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        template = tokenizer.chat_template
        self._template: str | None = template if isinstance(template, str | None) else json.dumps(template)
        self.has_tools = self._template is not None and "tools" in self._template and CALL in self._template
        added = tokenizer.added_tokens_decoder.items()
        self._hidden = {token_id for token_id, token in added if token.special and token.content not in _SHOWN}

    @property
    def template_hash(self) -> str | None:
        return None if self._template is None else hashlib.sha256(self._template.encode()).hexdigest()

    def render(self, request: ChatRequest, *, generation: bool = True) -> str:
        """Return the prompt as text; `generation` appends the tokens that open the answer. Raises RequestError."""
        if self._template is None:
            raise RequestError("This model has no chat template; use the completions endpoint.", code="no_template")
        options: Json = {"add_generation_prompt": True, **request.template_kwargs}
        if not generation:
            options["add_generation_prompt"] = False
        try:
            text = self._tokenizer.apply_chat_template(
                list(map(self._template_message, request.messages)),
                tools=list(request.tools) if uses_tools(request) else None,
                tokenize=False,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"The model's chat template cannot render this conversation: {error}", param="messages"
            ) from error
        return str(text)

    def _template_message(self, message: Message) -> Json:
        """Return a message for the template. A template leaves out messages of a role that it does not know. So if it
        does not know the role `developer`, a developer message becomes a system message."""
        prepared = template_message(message)
        if message.role == "developer" and "developer" not in (self._template or ""):
            prepared["role"] = "system"
        return prepared

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Return the ids of a text. With `raw` (a text that no template rendered) the tokenizer may add tokens such as
        BOS."""
        return list(self._backend.encode(text, add_special_tokens=raw).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def stream(self, stop: Sequence[str]) -> TextStream:
        """Return a decoder of one answer. It cuts the text before the first of the strings `stop`."""
        return TextStream(TokenDecoder(self.decode, self._hidden), stop)

    def reasoning(self, prompt: str) -> Reasoning:
        """Return how answers to this rendered prompt mark reasoning."""
        return reasoning_kind(self._template, prompt)


class TokenDecoder:
    """Decoder of a stream of ids.

    The text of a token may depend on its neighbours (a leading space, the bytes of one character). So a short window of
    ids is decoded with and without the new id, and the difference is the new text. `decode` returns the text of ids;
    `hidden` are ids without text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: set[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._settled = 0

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        return text

    def close(self) -> str:
        """Return the rest of the text, with U+FFFD for bytes that never became a character."""
        return self._new_text()

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._settled])) :]


class TextStream:
    """Text of one choice while it is sampled. `stopped_at` is the stop string that ended it."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = StopStrings(stop)

    @property
    def stopped_at(self) -> str | None:
        return self._stop.stopped_at

    def feed(self, token_id: int) -> str:
        """Return the text that this token adds. Its last characters are held back if they may begin a stop string."""
        return self._stop.feed(self._decoder.feed(token_id))

    def close(self) -> str:
        """Return the text that `feed` held back until the end; empty if a stop string ended the answer."""
        return "" if self.stopped_at is not None else self._stop.feed(self._decoder.close()) + self._stop.close()
