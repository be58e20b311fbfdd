"""Answers in the format of a server's chat template, and requests that make the server sample exactly these answers.

A template shows how its model writes a tool call: if a conversation is rendered with an answer that calls a tool, the
tokens after the opening of the answer are the tokens of the call. A grammar that is a sequence of token ids makes the
server sample exactly these tokens, control tokens included. With a reasoning parser, vLLM applies a
grammar only after the reasoning. Therefore the request also has a bias for the token that ends reasoning in the
template, so that the server samples this token at once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from polar_proxy.engines.vllm.client import VllmClient, unless_refused
from polar_proxy.sequences import first_difference
from polar_proxy.types import Json

USER: list[Json] = [{"role": "user", "content": "Count to three."}]
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "integer"},
                "share": {"type": "number"},
                "all": {"type": "boolean"},
                "names": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
            },
            "required": ["path"],
        },
    },
}
CALL_IDS = ("polarcal1", "polarcal2")
"""Ids of nine letters and digits, because Mistral's templates refuse others."""
CONTENT, REASONING = "I look.", "Slowly."
AWKWARD_CONTENT = 'In C:\\new & `d` <e>: "é".'
ARGUMENTS = {"path": "a"}, {"path": 'b é "c" <d> {e}\nf'}
TYPED_ARGUMENTS: Json = {"path": "a", "lines": 3, "share": 0.5, "all": True, "names": ["b", "1"], "more": {"c": None}}

UNWANTED = "~"
_TO_STOP = 8
"""`max_tokens` is larger than a forced answer by this number, so that the server can end the answer by itself."""

Render = Callable[[list[Json], bool], Awaitable[list[int]]]
"""Renders messages and returns their token ids. If the bool is True, adds the tokens that open an answer."""


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The tokens that the server is made to sample as its answer."""

    name: str
    ids: tuple[int, ...]
    contains_call: bool = False
    cut: bool = False
    """True if `ids` are only the beginning of an answer: `max_tokens` makes the server stop after the last of them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that the server is made to answer."""

    messages: list[Json]
    prompt: tuple[int, ...]
    name_suffix: str = ""
    """Text to append to the names of answers to this conversation, such as " after a tool call"."""


def call_turn(arguments: Sequence[Json], content: str = "") -> Json:
    """Return an assistant message with a call of the tool `look` for each of `arguments` (at most two)."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": "look", "arguments": json.dumps(each, ensure_ascii=False)}}
        for id_, each in zip(CALL_IDS, arguments, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def after_call(user: list[Json]) -> list[Json]:
    """Return the messages `user`, followed by an answer that reasons and calls a tool, and by the tool's result."""
    turn = call_turn(ARGUMENTS[:1]) | {"reasoning": REASONING, "reasoning_content": REASONING}
    return [*user, turn, {"role": "tool", "tool_call_id": CALL_IDS[0], "content": "1 2 3"}]


async def template_answers(render: Render, user: list[Json], end_of_turn: int) -> list[TargetAnswer]:
    """Return answers to the messages `user`. Each answer calls a tool, in the format of the server's template.

    Answers that the template refuses are left out.
    """
    opened = await render(user, True)
    one, other = ARGUMENTS
    out = []
    for name, arguments, content in (
        ("a call in its template's format", (one,), ""),
        ("text and a call in its template's format", (one,), CONTENT),
        ("two calls in its template's format", (one, other), ""),
        ("an awkward call in its template's format", (other,), ""),
        ("awkward text and a call in its template's format", (one,), AWKWARD_CONTENT),
        ("a call with arguments of several types in its template's format", (TYPED_ARGUMENTS,), ""),
    ):
        whole = await unless_refused(render([*user, call_turn(arguments, content)], False))
        if whole is None:
            continue
        ids = whole[first_difference(opened, whole) :]
        ids = ids[: ids.index(end_of_turn)] if end_of_turn in ids else ids
        out.append(TargetAnswer(name, tuple(ids), contains_call=True))
    if out:
        beginning = out[0].ids[: max(1, len(out[0].ids) * 2 // 3)]
        out.append(TargetAnswer("a cut call in its template's format", beginning, contains_call=True, cut=True))
    return out


async def find_end_of_reasoning(client: VllmClient, render: Render, user: list[Json]) -> int | None:
    """Return the token that ends reasoning in the template; None if no single token does.

    It is found in a rendered answer. Some templates (Gemma 4) show reasoning only if the answer also calls a tool, so
    an answer with a tool call is rendered too.
    """
    for answer in ({"role": "assistant", "content": CONTENT}, call_turn(ARGUMENTS[:1])):
        reasoned = answer | {"reasoning": REASONING, "reasoning_content": REASONING}
        whole = await unless_refused(render([*user, reasoned], False))
        plain = await unless_refused(render([*user, answer], False))
        if whole is None or plain is None:
            continue
        call = 0 if answer["content"] else first_difference(whole[::-1], plain[::-1])
        _, found, after = (await client.decode(whole[: len(whole) - call])).rpartition(REASONING)
        tag = after.partition(CONTENT)[0].strip()
        ids = await client.encode(tag) if found and tag else []
        if len(ids) == 1:
            return ids[0]
    return None


def after_reasoning(ids: Sequence[int], end_of_reasoning: int | None) -> tuple[int, ...]:
    """Return the tokens after the last end of reasoning."""
    ended = [place for place, token in enumerate(ids) if token == end_of_reasoning]
    return tuple(ids[ended[-1] + 1 :] if ended else ids)


def forcing_fields(target: TargetAnswer, end_of_reasoning: int | None, unwanted: Sequence[int]) -> Json:
    """Return the fields of a chat request that make the server sample this answer.

    If two grammars differ only in token ids, xgrammar 0.2.8 (vLLM 0.32) confuses them, and forces the tokens of the
    earlier grammar. Therefore the grammar allows a random text after the answer, which makes the grammar unique. The
    random text begins with UNWANTED. A bias against the token ids `unwanted` of UNWANTED keeps the server from sampling
    the random text.
    """
    ids = after_reasoning(target.ids, end_of_reasoning)
    biases = dict.fromkeys(unwanted, -100) | ({} if end_of_reasoning is None else {end_of_reasoning: 100})
    tokens = " ".join(f"Token({token})" for token in ids)
    limit = len(ids) + (end_of_reasoning is not None) + (0 if target.cut else _TO_STOP)
    return {
        "max_tokens": limit,
        "logit_bias": {str(token): bias for token, bias in biases.items()},
        "structured_outputs": {"grammar": f'root ::= {tokens} ("{UNWANTED}{secrets.token_hex(8)}")?'},
    }
