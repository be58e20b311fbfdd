"""The scripted model: scenarios as data, and the answer to each request of a run.

Apart from faults and a full context, an answer depends on the request alone, so that a retry gets the same answer.
Every answer carries a tag such as `step-3-<nonce>`. The highest tag in a conversation shows how far the run is, even
after retries, compaction and other changes that a harness makes to its messages.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from polar_proxy.conformance.profiles import Arguments, HarnessProfile
from polar_proxy.conformance.recording_proxy import Exchange
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.sessions.identity import NO_METADATA
from polar_proxy.sessions.rules import COMPACTION_REQUESTS, SIDE_CALLS, RequestTexts, match
from polar_proxy.types import ChatRequest, EngineRequest, Json, ToolCall, new_id

FaultKind = Literal["429", "500", "slow", "drop"]
RequestKind = Literal["main", "subagent", "compaction", "side_call"]
_LARGEST_CUT_REQUEST = 1 << 22
_CONTEXT_FULL = "This model's maximum context length is 1000 tokens. Your messages resulted in 2000 tokens."


Step = tuple[str, ...] | Literal["start_subagent", "wait_for_subagent", "finish"]
"""Action of one answer: run shell commands, start a sub-agent, wait for the sub-agent, or report that the work is done.
Each command line first prints a text that proves that the line was run. If the harness has no tool for waiting, a
command waits."""
RUN = ("true",)
"""A step that runs one command."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The script of one run of a harness's program, or of two runs if there is a second user turn."""

    name: str
    title: str
    steps: tuple[Step, ...]
    second: tuple[Step, ...] = ()
    """Steps of a second user turn, in a second start of the program with the same home and workspace."""
    faults: tuple[FaultKind, ...] = ()
    """Each fault has its own step, and occurs at the first request for this step. If a run ends before the fault's
    step, the fault is tried in another run."""
    fills_context: bool = False
    """True if the context is reported as full from the second step on, until the harness requests a summary. The number
    of commands in such a scenario is `HarnessProfile.compaction_steps`, whatever `steps` says."""
    endless: bool = False
    """True if the answer is so slow that the program is killed in the middle of it."""
    refuses: bool = False
    """True if every request gets an error that is not worth a retry."""
    seconds: float = 120.0
    """Time limit of one start of the program."""


BASIC = Scenario(
    "basic",
    "a command, two commands at once, the end; then a second user turn",
    steps=(RUN, ("true", "true"), "finish"),
    second=(RUN, "finish"),
)
SCENARIOS = (
    BASIC,
    Scenario("long", "25 commands and the end", steps=(*[RUN] * 25, "finish"), seconds=240),
    Scenario("subagent", "a sub-agent that runs a command", steps=("start_subagent", "wait_for_subagent", "finish")),
    Scenario("compaction", "the context fills up", steps=(RUN, "finish"), fills_context=True, seconds=240),
    Scenario(
        "faults",
        "429, 500, a slow first byte, a connection that is reset",
        steps=(*[RUN] * 5, "finish"),
        faults=("429", "500", "slow", "drop"),
        seconds=180,
    ),
    Scenario("killed", "the program is killed in the middle of an answer", steps=("finish",), endless=True),
    Scenario("refused", "the model refuses every request", steps=("finish",), refuses=True),
)
_SUBAGENT_STEPS: tuple[Step, ...] = (RUN, "finish")


@dataclass(slots=True)
class ReceivedRequest:
    """One request that reached the engine."""

    kind: RequestKind
    step: int
    """Number of the step that the request asks for."""
    request: ChatRequest
    at: float
    fault: FaultKind | None = None


@dataclass(slots=True)
class ScriptedModel:
    """A scripted model for one run of a scenario. Called with a request, it returns the reply that the scenario
    prescribes.

    Set an instance as `script` of a scripted engine.
    """

    profile: HarnessProfile
    scenario: Scenario
    slow: float
    """Seconds before the first byte of a reply with the fault `slow`."""
    faults: dict[int, FaultKind] = field(default_factory=dict)
    """Fault by the number of the step."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    requests: list[ReceivedRequest] = field(default_factory=list)
    instructions: tuple[str, str] | None = None
    """The user's texts for the two turns. If None, `instruction` makes the texts."""
    compacted: bool = False
    _fired: set[int] = field(default_factory=set)
    _cut: set[int] = field(default_factory=set)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.scenario.steps, *self.scenario.second)

    def instruction(self, turn: int) -> str:
        """Return the text with which the user begins a turn. `turn`: 0 for the first, 1 for the second."""
        if self.instructions is not None:
            return self.instructions[turn]
        word = "Look around in this folder" if turn == 0 else "Look around once more"
        return f"{word}, change a.txt, and say when it is done (main-{self.nonce}, part {turn + 1})."

    def tag(self, step: int, kind: RequestKind = "main") -> str:
        return f"{'step' if kind == 'main' else 'cstep'}-{step}-{self.nonce}"

    def __call__(self, request: EngineRequest) -> ScriptedReply:
        if not isinstance(request, ChatRequest):
            return ScriptedReply("This is not a conversation.")
        kind, step = self._classify(request)
        received = ReceivedRequest(kind, step, request, time.time())
        self.requests.append(received)
        if self.scenario.refuses:
            return ScriptedReply(error=self._refusal())
        if kind == "side_call":
            return ScriptedReply("{}" if request.response_format else "A small task")
        if kind == "compaction":
            self.compacted = True
            return ScriptedReply(self._summary(step))
        if kind == "subagent":
            return step_reply(self.profile, _SUBAGENT_STEPS[min(step, 1)], self.tag(step, "subagent"))
        return self._main_reply(received)

    def _main_reply(self, received: ReceivedRequest) -> ScriptedReply:
        """Return the reply to the main conversation. If the scenario says so, it is a fault, is late, or reports that
        the context is full."""
        number = received.step
        step = self.steps[number] if number < len(self.steps) else "finish"
        subagent, agent_id = f"child-{self.nonce}", _subagent_id(received.request)
        reply = step_reply(self.profile, step, self.tag(number), subagent=subagent, agent_id=agent_id)
        if self.scenario.endless:
            return replace(reply, text="word " * 2000, calls=(), pace=0.1)
        if self.scenario.fills_context and number >= 1 and not self.compacted:
            if self.profile.context_error:
                return ScriptedReply(error=RequestError(_CONTEXT_FULL, code="context_length_exceeded"))
            return replace(reply, prompt_tokens=self.profile.full_prompt_tokens)
        fault = self.faults.get(number)
        if fault is None or number in self._fired:
            return reply
        self._fired.add(number)
        received.fault = fault
        if fault == "slow":
            return replace(reply, wait=self.slow)
        if fault == "drop":
            return replace(reply, pace=0.1)
        message = "Too many requests at once." if fault == "429" else "The scripted engine broke."
        return ScriptedReply(error=EngineError(message, status=int(fault)))

    def should_cut(self, exchange: Exchange) -> bool:
        """Return whether the recording proxy shall break off the answer to this request."""
        if "drop" not in self.faults.values() or len(exchange.body) > _LARGEST_CUT_REQUEST:
            return False
        text = exchange.body.decode(errors="replace")
        step = self._next_step(text, "main")
        if self.faults.get(step) != "drop" or step in self._cut or not self._offers_tool(text):
            return False
        self._cut.add(step)
        return True

    def _classify(self, request: ChatRequest) -> tuple[RequestKind, int]:
        text = orjson.dumps([message.to_openai() for message in request.messages]).decode()
        texts = RequestTexts.of(request.messages, has_tools=bool(request.tools))
        if match(COMPACTION_REQUESTS, texts, NO_METADATA) is not None:
            return "compaction", self._next_step(text, "main")
        if match(SIDE_CALLS, texts, NO_METADATA) is not None:
            return "side_call", 0
        if not self._offers_tool(orjson.dumps(request.tools).decode()):
            return "side_call", 0
        users = [message for message in request.messages if message.role == "user"]
        if any(f"child-{self.nonce}" in orjson.dumps(message.content).decode() for message in users):
            return "subagent", self._next_step(text, "subagent")
        return "main", self._next_step(text, "main")

    def _offers_tool(self, text: str) -> bool:
        return f'"{self.profile.tool}"' in text if self.profile.tool else True

    def _next_step(self, text: str, kind: RequestKind) -> int:
        """Return the number of the next step: the number of the text's highest tag plus 1, or 0 without a tag."""
        word = "step" if kind == "main" else "cstep"
        found = re.findall(rf"(?<![a-z]){word}-(\d+)-{self.nonce}", text)
        return max(map(int, found), default=-1) + 1

    def _summary(self, step: int) -> str:
        content = f"The user wants main-{self.nonce}; the last thing that was done is {self.tag(step - 1)}."
        return f"<analysis>Short.</analysis>\n<summary>\n<state_snapshot>\n{content}\n</state_snapshot>\n</summary>"

    def _refusal(self) -> RequestError | EngineError:
        status = self.profile.refusal_status
        if status == 401:
            return RequestError("Incorrect API key provided.", status=401, code="invalid_api_key")
        return EngineError("The scripted engine refuses every request.", status=status)


def step_reply(
    profile: HarnessProfile, step: Step, tag: str, *, subagent: str = "", agent_id: str = ""
) -> ScriptedReply:
    """Return the scripted answer for `step` of a scenario, in the form that the harness understands.

    The answer contains `tag`. Later requests contain this answer, so the highest tag in a request shows how far the run
    is. If the step starts a sub-agent, `subagent` is the text with which the sub-agent's task begins. If the step
    waits for a sub-agent, `agent_id` is the sub-agent's id.
    """
    if profile.answer_format == "terminus":
        return _terminus_reply(step, tag)
    if profile.answer_format == "aider":
        return _aider_reply(step, tag)
    text = ""
    calls: list[tuple[str, Json]] = []
    if isinstance(step, tuple):
        for number, command in enumerate(step):
            traced = traced_command(tag, number, command) + profile.command_suffix
            calls.append((profile.tool, _fill(profile.arguments, command=traced)))
    elif step == "start_subagent" and profile.start_subagent is not None:
        name, arguments = profile.start_subagent
        prompt = f"{subagent}: run one command in a shell, then say what it printed. ({tag})"
        calls.append((name, _fill(arguments, prompt=prompt)))
    elif step == "wait_for_subagent":
        if profile.wait_for_subagent is None:
            return step_reply(profile, (f"sleep 1; echo {tag}",), tag)
        name, arguments = profile.wait_for_subagent
        text = f"Waiting: {tag}."
        calls.append((name, _fill(arguments, agent=agent_id)))
    elif profile.finish is not None:
        name, arguments = profile.finish
        calls.append((name, _fill(arguments, command=f"echo {tag}")))
    else:
        text = f"It is done: {tag}."
    made = tuple(ToolCall(new_id("call"), name, json.dumps(arguments)) for name, arguments in calls)
    return ScriptedReply(text, f"I thought of thought-{tag}.", made)


def _terminus_reply(step: Step, tag: str) -> ScriptedReply:
    """Return the answer for Terminus 2: a JSON object. It has the keystrokes for the terminal, and says whether the
    task is complete."""
    commands = step if isinstance(step, tuple) else ()
    keys = [
        {"keystrokes": traced_command(tag, number, text) + "\n", "duration": 0.3}
        for number, text in enumerate(commands)
    ]
    done = step == "finish"
    value = {"analysis": f"I am at {tag}.", "plan": "Go on.", "commands": keys, "task_complete": done}
    return ScriptedReply(text=json.dumps(value), reasoning=f"I thought of thought-{tag}.")


def _aider_reply(step: Step, tag: str) -> ScriptedReply:
    """Return the answer for aider, which calls no tools: it takes whole files from the text of an answer."""
    if step == "finish":
        return ScriptedReply(text=f"Nothing is left to do: {tag}.", reasoning=f"I thought of thought-{tag}.")
    text = f"I change the file: {tag}.\n\na.txt\n```\nhello\n{tag}\n```\n"
    return ScriptedReply(text=text, reasoning=f"I thought of thought-{tag}.")


def traced_command(tag: str, number: int, command: str) -> str:
    """Return a command line that prints `tag` and `ran-N`, where N is 42 + `number`, and then runs `command`.

    The printed text proves that the line was run, because the line itself does not contain it: printf computes N. The
    line uses no shell substitution, because some harnesses refuse to run commands with substitutions.
    """
    return f"printf '%s ran-%d\\n' {tag} 0{0o52 + number:o}; {command}"


def _fill(arguments: Arguments, **values: str) -> Json:
    """Replace `{name}` in all strings of a tool call's arguments."""

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, text in values.items():
                value = value.replace("{" + name + "}", text)
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return value

    return {key: fill(value) for key, value in arguments.items()}


def _subagent_id(request: ChatRequest) -> str:
    """Return the id of a sub-agent, from the result of the tool that started it."""
    for message in reversed(request.messages):
        if message.role == "tool" and (found := re.search(r'"agent_id"\s*:\s*"([^"]+)"', str(message.content))):
            return found[1]
    return ""
