"""Conversations to token ids, and sampled token ids to text.

Messages are prepared for the chat template as vLLM does it. Streamed text obeys one invariant: the pieces of a stream,
joined, are the decoding of all its ids without special tokens, up to the first stop string.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from polar_proxy.engines.base import uses_tools
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, Reasoning
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message

_SHOWN = (THINK, END_THINK, CALL, END_CALL)
"""Tokens that some tokenizers mark as special, but whose text the answer parser needs."""


class ChatTemplate:
    """Render and encode conversations; thread-safe. `tokenizer` is a fast tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        template = tokenizer.chat_template
        self.source: str | None = template if isinstance(template, str) or template is None else json.dumps(template)
        self.has_tools = self.source is not None and "tools" in self.source and CALL in self.source
        self._has_reasoning = self.source is not None and THINK in self.source

    @property
    def hash(self) -> str | None:
        return hashlib.sha256(self.source.encode()).hexdigest() if self.source is not None else None

    def render(self, request: ChatRequest, *, generation: bool = True) -> str:
        """Return the prompt as text; `generation` appends the tokens that open the answer. Raises RequestError."""
        if self.source is None:
            raise RequestError("This model has no chat template; use the completions endpoint.", code="no_template")
        options: Json = {"add_generation_prompt": True, **request.template_kwargs}
        if not generation:
            options["add_generation_prompt"] = False
        try:
            text = self._tokenizer.apply_chat_template(
                [template_message(message) for message in request.messages],
                tools=list(request.tools) if uses_tools(request) else None,
                tokenize=False,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"The model's chat template cannot render this conversation: {error}", param="messages"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt, with the special tokens that the tokenizer adds (such as BOS)."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def reasoning(self, prompt: str) -> Reasoning:
        """Return whether answers to this rendered prompt may begin with reasoning, or start inside it."""
        if not self._has_reasoning:
            return "off"
        return "open" if prompt.rstrip().endswith(THINK) else "tags"


def template_message(message: Message) -> Json:
    """Return a message as templates expect it: content as one string, tool-call arguments as an object."""
    out = message.to_openai()
    out["content"] = flat_text(message.content)
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    for call in out.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return out


def _arguments(text: str) -> Any:
    """Parse a call's arguments. Text that is not JSON stays text, so that an agent can send back its own history."""
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def flat_text(content: str | list[Json] | None) -> str:
    """Join content parts with line breaks, as vLLM does. Raises RequestError for anything but text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text")
        text = part.get("text", part.get("refusal"))
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"This model reads text only, not a content part of type {kind!r}.", param="messages", code="no_images"
            )
        texts.append(text)
    return "\n".join(texts)


class TokenDecoder(Protocol):
    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""

    def close(self) -> str:
        """Return the rest of the text, with U+FFFD for bytes that never became a character."""


class Vocabulary:
    """Text of single tokens, and decoders for streams of them. Built once per (fast) tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        spec = json.loads(self._backend.to_str())
        added = {entry["id"]: entry for entry in spec["added_tokens"]}
        self._hidden = frozenset(
            token_id for token_id, entry in added.items() if entry["special"] and entry["content"] not in _SHOWN
        )
        self.ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.size = max(self.ids.values()) + 1
        self._bytes: list[bytes] | None = None
        """The bytes of each token, for a byte-level tokenizer."""
        if _is_byte_level(spec.get("decoder")):
            table = _byte_of_char()
            self._bytes = [b""] * self.size
            for text, token_id in self.ids.items():
                known = token_id not in added and all(char in table for char in text)
                self._bytes[token_id] = bytes(table[char] for char in text) if known else text.encode()

    def text(self, token_id: int) -> str:
        """Return the text of one token, special tokens included; "" for an id without a token."""
        if not 0 <= token_id < self.size:
            return ""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a sequence, special tokens included."""
        if self._bytes is not None:
            known = [self._bytes[token] for token in token_ids if 0 <= token < self.size]
            return b"".join(known).decode("utf-8", "replace")
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def decoder(self) -> TokenDecoder:
        if self._bytes is not None:
            return _ByteDecoder(self._bytes, self._hidden)
        return _WindowDecoder(self._backend, self._hidden)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's mapping from bytes to printable characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


class _ByteDecoder:
    """Decode byte-level BPE: a table look-up and an incremental UTF-8 decoder."""

    def __init__(self, pieces: list[bytes], hidden: Collection[int]) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden or token_id >= len(self._pieces):
            return ""
        return self._utf8.decode(self._pieces[token_id])

    def close(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decode with any other tokenizer: decode a short window of ids with and without the new ones, and return the
    difference.

    The window is needed because such decoders depend on neighbouring tokens (a leading space, the bytes of one
    character).
    """

    def __init__(self, backend: Any, hidden: Collection[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._ids: list[int] = []
        self._settled = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        known, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        if len(now) <= len(known) or now.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        return now[len(known) :]

    def close(self) -> str:
        known, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        self._settled = len(self._ids)
        return now[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class TextStream:
    """Text of one choice while it is sampled. `stopped_at` is the stop string that ended it."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.stopped_at: str | None = None

    def feed(self, token_id: int) -> str:
        """Return the new text, except for its end if that may be the beginning of a stop string."""
        text = self._decoder.feed(token_id)
        return self._release(text) if self._stop else text

    def close(self) -> str:
        """Return the rest at the end of the answer."""
        if self.stopped_at is not None:
            return ""
        text = self._release(self._decoder.close())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_at = min(found)
            self._held = ""
            return text[:place]
        hold = _held_back(text, self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(word.startswith(text[-size:]) for word in stop):
            return size
    return 0
