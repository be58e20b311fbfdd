"""The same value and the same text, written as no serialiser and no tokenizer would write them. Pure.

A policy at temperature 1 writes JSON with its own spaces, escapes and order of keys, and samples texts as other tokens
than the tokenizer would cut them into. Both come back changed from a harness and a template: that is where re-rendered
prompts leave the tokens that were sampled.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polar_proxy.engines.scripted import Reply

_TAG = re.compile(r"(</?(?:think|tool_call)>)")


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written. All of it is what JSON allows, and reads as the same value."""

    comma: str = ", "
    colon: str = ": "
    inside: str = ""
    """Put behind an opening and before a closing bracket."""
    ascii: bool = False
    """Characters beyond ASCII as `\\u` escapes, and `/` as `\\/`."""
    reverse: bool = False
    """Keys in the opposite order."""
    exponents: bool = False
    """Whole numbers as 1.0 or 2e4."""


STYLES: Mapping[str, JsonStyle] = {
    "plain": JsonStyle(),
    "escaped": JsonStyle(comma=",", colon=":", ascii=True),
    "spaced": JsonStyle(comma=" ,\n   ", colon=" :  ", inside=" "),
    "reversed": JsonStyle(reverse=True, inside="\n"),
    "numbers": JsonStyle(exponents=True, reverse=True, comma=" , "),
}


def written(value: Any, style: JsonStyle) -> str:
    """`value` as JSON text in that style."""
    if isinstance(value, Mapping):
        items = [(written(str(key), style) + style.colon + written(item, style)) for key, item in value.items()]
        return _bracketed("{", items[::-1] if style.reverse else items, "}", style)
    if isinstance(value, list | tuple):
        return _bracketed("[", [written(item, style) for item in value], "]", style)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=style.ascii)
        return text.replace("/", "\\/") if style.ascii else text
    if style.exponents and isinstance(value, int) and not isinstance(value, bool):
        return f"{value // 1000}e3" if value and value % 1000 == 0 else f"{value}.0"
    return json.dumps(value)


def _bracketed(opening: str, items: list[str], closing: str, style: JsonStyle) -> str:
    return opening + (style.inside + style.comma.join(items) + style.inside if items else "") + closing


def spoken(reply: Reply) -> str:
    """An answer as a model of the Qwen family writes it: reasoning in `<think>`, empty or not, calls as Hermes JSON."""
    out = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.text}"
    for number, call in enumerate(reply.calls):
        out += ("\n" if reply.text or number else "") + "<tool_call>\n"
        out += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
    return out


def pieces(text: str, *, every: int) -> list[str]:
    """`text` cut at random places, on average one in `every` characters; 0 cuts nowhere. Tags stay whole.

    The same text is always cut alike, so that a request that is sent again gets the same tokens.
    """
    chance = random.Random(text)
    out: list[str] = []
    for part in _TAG.split(text):
        if _TAG.fullmatch(part) or not every:
            out += [part] if part else []
            continue
        start = 0
        for place in range(1, len(part) + 1):
            if place == len(part) or chance.random() < 1 / every:
                out.append(part[start:place])
                start = place
    return out
