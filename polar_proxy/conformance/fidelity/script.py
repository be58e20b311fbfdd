"""What the model says in a fidelity run: one answer for each thing that makes a re-rendered prompt leave its tokens.

The director of the conformance checks says *what* is done (tool names and arguments are the harness's own); here it is
written awkwardly: JSON in five manners, characters beyond ASCII, optional arguments of every scalar type, empty and
nested arguments, two calls at once, text before a call, white space around everything, long answers, long outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polar_proxy.conformance.fidelity.answers import STYLES, JsonStyle, written
from polar_proxy.conformance.profiles import say
from polar_proxy.conformance.scenarios import Finish, RunCommands, Scenario, Step
from polar_proxy.conformance.scripted_model import ReceivedRequest, ScriptedModel
from polar_proxy.engines.scripted import Reply
from polar_proxy.types import ChatRequest, Json, ToolCall, new_id

LONG_OUTPUT = "yes 'The quick brown fox jumps over the lazy dog.' | head -c 30000"
"""A command that prints 30 kB."""
_PLAIN_COMMAND = "printf '%s\\n' 'caf\u00e9 na\u00efve \u2014 \"q\" \\ / \u6f22\u5b57 \U0001f642'"
_LONG_COMMAND = "cat > notes.txt <<'EOF'\n" + "".join(
    f'{{"line": {n}, "ok": {str(n % 2 == 0).lower()}}}\t# caf\u00e9 \\ {n}\n' for n in range(5)
)
_LONG_COMMAND += "EOF"
_MARKDOWN = "".join(
    f"\n{n}. **Step {n}**:  `a.txt` \u2014 don't; \u201cdone\u201d \n\n```json\n{{}}\n```\n" for n in range(3)
)
_UNKNOWN: Json = {"none": {}, "deep": {"list": [1, 2000, True, None, {"a/b": "\u00e9\u2028"}], "empty": []}}
_PATIENCE = 3
"""How often a step is asked for before the run is ended: some harnesses drop an answer that they cannot use."""


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How one step is written."""

    style: str = "plain"
    before: str = ""
    """Text before the calls."""
    thought: str = "Hm."
    """Put behind the thought."""
    silent: bool = False
    """No reasoning."""
    options: bool = False
    """Optional arguments of the tool, of every scalar type, are given too."""
    odd: bool = False
    """Beside the call: one of the same tool without arguments, and one of a tool that there is not."""


@dataclass(frozen=True, slots=True)
class StyledStep:
    """A step and how it is written."""

    step: Step
    manner: AnswerStyle


FIRST = (
    StyledStep(RunCommands((_PLAIN_COMMAND,)), AnswerStyle("escaped")),
    StyledStep(RunCommands(("true", "echo /tmp")), AnswerStyle("spaced", before="I look, twice. ")),
    StyledStep(RunCommands(), AnswerStyle("numbers", options=True, thought="Let me see.\n\n- a\n-  b \n ")),
    StyledStep(RunCommands((LONG_OUTPUT,)), AnswerStyle("plain", before="\n\nNow a long one:\n", silent=True)),
    StyledStep(RunCommands((_LONG_COMMAND,)), AnswerStyle("reversed", thought="word " * 40)),
    StyledStep(RunCommands(), AnswerStyle("plain", odd=True)),
    StyledStep(Finish(), AnswerStyle("reversed")),
)
SECOND = (
    StyledStep(RunCommands(), AnswerStyle("reversed", before="Once more.")),
    StyledStep(Finish(), AnswerStyle(thought="I am done. ")),
)
SCENARIO = Scenario(
    "fidelity",
    "awkward answers, long outputs, a second turn",
    steps=tuple(told.step for told in FIRST),
    second=tuple(told.step for told in SECOND),
    seconds=240,
)


class FidelityModel(ScriptedModel):
    """The conformance director, with another way to write. `SCENARIO` without its second turn is fine too."""

    def _main(self, asked: ReceivedRequest) -> Reply:
        all_told = (*FIRST, *SECOND) if self.scenario.second else FIRST
        times = sum(other.kind == "main" and other.step == asked.step for other in self.asked)
        if asked.step >= len(all_told) or times > _PATIENCE:
            return say(self.profile, Finish(), self.tag(asked.step), "")
        told = all_told[asked.step]
        reply = say(self.profile, told.step, self.tag(asked.step), "")
        return _told(reply, told, self.profile.tool, asked.request, self.tag(asked.step))


def _told(reply: Reply, told: StyledStep, tool: str, request: ChatRequest, tag: str) -> Reply:
    manner, style = told.manner, STYLES[told.manner.style]
    reasoning = "" if manner.silent else f"{reply.reasoning} {manner.thought}"
    if not reply.calls:
        text = _object(reply.text, style)
        return replace(reply, reasoning=reasoning, text=text if text != reply.text else text + _MARKDOWN)
    extra = _options(request, tool) if manner.options else {}
    calls = [replace(call, arguments=written(json.loads(call.arguments) | extra, style)) for call in reply.calls]
    if manner.odd:
        calls.append(ToolCall(new_id("call"), tool, "{}"))
        calls.append(ToolCall(new_id("call"), "no_such_tool", written(_UNKNOWN, STYLES["numbers"])))
    return replace(reply, reasoning=reasoning, text=manner.before, calls=tuple(calls))


def _object(text: str, style: JsonStyle) -> str:
    """A text that is one JSON object (a model that acts by text says such), in that style; any other as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return written(value, style) if isinstance(value, dict) else text


def _options(request: ChatRequest, tool: str) -> dict[str, Any]:
    """A value for every optional boolean and number of the tool, as its own schema names them."""
    for offered in request.tools:
        function = offered.get("function") or {}
        if function.get("name") == tool:
            schema: Mapping[str, Any] = function.get("parameters") or {}
            required = schema.get("required") or ()
            found = {
                name: _OPTION[form.get("type")]
                for name, form in (schema.get("properties") or {}).items()
                if name not in required and isinstance(form, Mapping) and form.get("type") in _OPTION
            }
            return dict(found)
    return {}


_OPTION: Mapping[Any, Any] = {"boolean": False, "integer": 20000, "number": 20000}
