"""From token ids to text as they come: partial UTF-8 is held, special tokens are hidden, stop strings cut.

Invariant: the pieces of a stream, put in a row, are the decoding of all its ids without special tokens, up to the first
stop string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens which some tokenizers mark as special but whose text a parser needs."""


class TokenDecoder(Protocol):
    def feed(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""

    def close(self) -> str:
        """Text still held, with U+FFFD for what never became a character."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, the way back."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """Text of single tokens, and decoders for streams of them; made once for each tokenizer (a fast one)."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        spec = json.loads(self._backend.to_str())
        added = {entry["id"]: entry for entry in spec["added_tokens"]}
        self.hidden = frozenset(
            token_id for token_id, entry in added.items() if entry["special"] and entry["content"] not in SHOWN
        )
        self.ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.size = max(self.ids.values()) + 1
        self._bytes: list[bytes] | None = None
        if _is_byte_level(spec.get("decoder")):
            table = _byte_of_char()
            pieces = [b""] * self.size
            for text, token_id in self.ids.items():
                known = token_id not in added and all(char in table for char in text)
                pieces[token_id] = bytes(table[char] for char in text) if known else text.encode()
            self._bytes = pieces

    def text(self, token_id: int) -> str:
        """The token alone, special tokens shown; "" for an id that no token has."""
        if not 0 <= token_id < self.size:
            return ""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes, special tokens shown."""
        if self._bytes is not None:
            return self._bytes[token_id] if 0 <= token_id < self.size else b""
        return self.text(token_id).encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole, special tokens shown."""
        if self._bytes is not None:
            return b"".join(map(self.bytes, token_ids)).decode("utf-8", "replace")
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def decoder(self) -> TokenDecoder:
        if self._bytes is not None:
            return _ByteDecoder(self._bytes, self.hidden)
        return _WindowDecoder(self._backend, self.hidden)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


class _ByteDecoder:
    """Byte-level BPE: a table look-up and an incremental UTF-8 decoder."""

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
    """Any other tokenizer: decode a short window of ids with and without the new ones, and take the difference.

    A window is needed because such decoders look at neighbours (a leading space, bytes of one character).
    """

    def __init__(self, backend: Any, hidden: Collection[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._ids: list[int] = []
        self._settled = 0

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        known, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        if len(now) <= len(known) or now.endswith("�"):
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        return now[len(known) :]

    def close(self) -> str:
        known, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        self._settled = len(self._ids)
        return now[len(known) :]


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class TextStream:
    """Text of one choice as it is sampled; `stopped_at` is the stop string that stands in it."""

    __slots__ = ("_decoder", "_held", "_stop", "stopped_at")

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.stopped_at: str | None = None

    def feed(self, token_id: int) -> str:
        """Text that can be told now; nothing of a stop string or of what may become one."""
        text = self._decoder.feed(token_id)
        return self._release(text) if self._stop else text

    def close(self) -> str:
        """The rest, at the end of the answer."""
        if self.stopped_at is not None:
            return ""
        text = self._release(self._decoder.close())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        text = self._held + text
        places = [(place, mark) for mark in self._stop if (place := text.find(mark)) >= 0]
        if places:
            place, self.stopped_at = min(places)
            self._held = ""
            return text[:place]
        hold = held_back(text, self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
