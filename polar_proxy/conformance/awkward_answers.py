"""The answers of a fidelity run: one for each cause that makes a re-rendered prompt differ from the sampled tokens.

The scripted model of the conformance checks decides *what* is done (tool names and arguments are the harness's own).
This module decides *how* it is written: as a policy at temperature 1 writes, not as a serialiser or tokenizer does. The
answers have JSON in five styles, characters beyond ASCII, optional booleans and numbers as arguments, empty and nested
arguments, two tool calls at once, text before a tool call, white space around everything, commands with long outputs,
and texts whose sampled tokens are not the ones that the tokenizer would choose. Some answers are long. Each of these
features is changed by some harness or chat template, so a re-rendered prompt differs from the sampled tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polar_proxy.conformance.scripted_model import (
    RUN,
    ReceivedRequest,
    Scenario,
    ScriptedModel,
    Step,
    step_reply,
)
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.types import ChatRequest, Json, ToolCall, new_id

LONG_OUTPUT = "yes 'The quick brown fox jumps over the lazy dog.' | head -c 30000"
"""A command that prints 30 kB."""
_UNICODE_COMMAND = "printf '%s\\n' 'caf\u00e9 na\u00efve \u2014 \"q\" \\ / \u6f22\u5b57 \U0001f642'"
_LONG_COMMAND = "cat > notes.txt <<'EOF'\n" + "".join(
    f'{{"line": {n}, "ok": {str(n % 2 == 0).lower()}}}\t# caf\u00e9 \\ {n}\n' for n in range(5)
)
_LONG_COMMAND += "EOF"
_MARKDOWN = "".join(
    f"\n{n}. **Step {n}**:  `a.txt` \u2014 don't; \u201cdone\u201d \n\n```json\n{{}}\n```\n" for n in range(3)
)
_UNKNOWN_ARGUMENTS: Json = {
    "none": {},
    "deep": {"list": [1, 2000, True, None, {"a/b": "\u00e9\u2028"}], "empty": []},
}
_OPTION_VALUES: Mapping[Any, Any] = {"boolean": False, "integer": 20000, "number": 20000}
_TAG = re.compile(r"(</?(?:think|tool_call)>)")
_MAX_REQUESTS_PER_STEP = 3
"""If a step is requested more often than this, the run is ended: some harnesses drop an unusable answer and ask again
forever."""


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written. In every style, the text is valid JSON and parses to the same value."""

    comma: str = ", "
    colon: str = ": "
    inside: str = ""
    """White space to write after an opening bracket and before a closing one."""
    ascii: bool = False
    """Write characters beyond ASCII as `\\u` escapes, and `/` as `\\/`."""
    reverse: bool = False
    """Write keys in the opposite order."""
    exponents: bool = False
    """Write whole numbers with a decimal point (1.0), and multiples of 1000 with an exponent (20e3)."""


STYLES: Mapping[str, JsonStyle] = {
    "plain": JsonStyle(),
    "escaped": JsonStyle(comma=",", colon=":", ascii=True),
    "spaced": JsonStyle(comma=" ,\n   ", colon=" :  ", inside=" "),
    "reversed": JsonStyle(reverse=True, inside="\n"),
    "numbers": JsonStyle(exponents=True, reverse=True, comma=" , "),
}


@dataclass(frozen=True, slots=True)
class StyledStep:
    """A step of a scenario, and how to write the answer that makes the agent do this step."""

    step: Step
    json: str = "plain"
    """Name of the JSON style, a key of STYLES."""
    before: str = ""
    """Text to write before the tool calls."""
    thought: str = "Hm."
    """Text to append to the reasoning."""
    silent: bool = False
    """Leave out the reasoning."""
    options: bool = False
    """Also pass the tool's optional arguments that are booleans or numbers."""
    odd_calls: bool = False
    """Add a tool call without arguments, and a call of a tool that does not exist."""


FIRST = (
    StyledStep((_UNICODE_COMMAND,), "escaped"),
    StyledStep(("true", "echo /tmp"), "spaced", before="I look, twice. "),
    StyledStep(RUN, "numbers", options=True, thought="Let me see.\n\n- a\n-  b \n "),
    StyledStep((LONG_OUTPUT,), before="\n\nNow a long one:\n", silent=True),
    StyledStep((_LONG_COMMAND,), "reversed", thought="word " * 40),
    StyledStep(RUN, odd_calls=True),
    StyledStep("finish", "reversed"),
)
SECOND = (
    StyledStep(RUN, "reversed", before="Once more."),
    StyledStep("finish", thought="I am done. "),
)
SCENARIO = Scenario(
    "fidelity",
    "awkward answers, long outputs, a second turn",
    steps=tuple(styled.step for styled in FIRST),
    second=tuple(styled.step for styled in SECOND),
    seconds=240,
)


class FidelityModel(ScriptedModel):
    """The scripted model with awkward answers, for `SCENARIO` with or without its second turn."""

    def _main_reply(self, received: ReceivedRequest) -> ScriptedReply:
        steps = (*FIRST, *SECOND) if self.scenario.second else FIRST
        count = sum(other.kind == "main" and other.step == received.step for other in self.requests)
        tag = self.tag(received.step)
        if received.step >= len(steps) or count > _MAX_REQUESTS_PER_STEP:
            return step_reply(self.profile, "finish", tag)
        styled = steps[received.step]
        reply = step_reply(self.profile, styled.step, tag)
        return _restyle(reply, styled, self.profile.tool, received.request)


def _restyle(reply: ScriptedReply, style: StyledStep, tool: str, request: ChatRequest) -> ScriptedReply:
    """Return the reply with its JSON and texts rewritten as `style` says, and with further arguments and tool calls."""
    json_style = STYLES[style.json]
    reasoning = "" if style.silent else f"{reply.reasoning} {style.thought}"
    if not reply.calls:
        text = _restyle_object(reply.text, json_style)
        return replace(reply, reasoning=reasoning, text=text if text != reply.text else text + _MARKDOWN)
    extra = _optional_arguments(request, tool) if style.options else {}
    calls = [replace(call, arguments=to_json(json.loads(call.arguments) | extra, json_style)) for call in reply.calls]
    if style.odd_calls:
        calls.append(ToolCall(new_id("call"), tool, "{}"))
        calls.append(ToolCall(new_id("call"), "no_such_tool", to_json(_UNKNOWN_ARGUMENTS, STYLES["numbers"])))
    return replace(reply, reasoning=reasoning, text=style.before, calls=tuple(calls))


def _restyle_object(text: str, style: JsonStyle) -> str:
    """Return `text` rewritten in a JSON style if it is one JSON object, else unchanged.

    An answer to Terminus 2, which has no tool calls, is such an object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return to_json(value, style) if isinstance(value, dict) else text


def _optional_arguments(request: ChatRequest, tool: str) -> dict[str, Any]:
    """Return a value for every optional boolean and number in the tool's own schema."""
    for offered in request.tools:
        function = offered.get("function") or {}
        if function.get("name") == tool:
            schema: Mapping[str, Any] = function.get("parameters") or {}
            required = schema.get("required") or ()
            return {
                name: _OPTION_VALUES[form.get("type")]
                for name, form in (schema.get("properties") or {}).items()
                if name not in required and isinstance(form, Mapping) and form.get("type") in _OPTION_VALUES
            }
    return {}


def to_json(value: Any, style: JsonStyle) -> str:
    """Return `value` as JSON text in a style."""
    if isinstance(value, Mapping):
        items = [(to_json(str(key), style) + style.colon + to_json(item, style)) for key, item in value.items()]
        return _bracketed("{", items[::-1] if style.reverse else items, "}", style)
    if isinstance(value, list | tuple):
        return _bracketed("[", [to_json(item, style) for item in value], "]", style)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=style.ascii)
        return text.replace("/", "\\/") if style.ascii else text
    if style.exponents and isinstance(value, int) and not isinstance(value, bool):
        return f"{value // 1000}e3" if value and value % 1000 == 0 else f"{value}.0"
    return json.dumps(value)


def _bracketed(opening: str, items: list[str], closing: str, style: JsonStyle) -> str:
    return opening + (style.inside + style.comma.join(items) + style.inside if items else "") + closing


def qwen_text(reply: ScriptedReply) -> str:
    """Return an answer as a Qwen model samples it: `<think>` tags, even around an empty reasoning, then the text and
    Hermes tool calls."""
    out = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.text}"
    for number, call in enumerate(reply.calls):
        out += ("\n" if reply.text or number else "") + "<tool_call>\n"
        out += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
    return out


def split_randomly(text: str, *, every: int, whole: re.Pattern[str] = _TAG) -> list[str]:
    """Cut `text` at random places, on average once in `every` characters; 0 cuts nowhere.

    Parts of the text that match the pattern `whole`, by default Qwen's tags, are not cut. The pattern must have exactly
    one group, around the whole pattern. The same text is always cut at the same places, so that a repeated request gets
    the same tokens.
    """
    chance = random.Random(text)
    pieces: list[str] = []
    for part in whole.split(text):
        if whole.fullmatch(part) or not every:
            pieces += [part] if part else []
            continue
        start = 0
        for place in range(1, len(part) + 1):
            if place == len(part) or chance.random() < 1 / every:
                pieces.append(part[start:place])
                start = place
    return pieces
