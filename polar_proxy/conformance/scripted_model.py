"""The script of one run: what to answer to a request, told by the request alone, so that a retry gets the same answer.

Every answer carries a tag, `step-3-<nonce>`. How far a conversation is, is the highest tag in it: that holds after
retries, compaction, and whatever else a harness does to its messages.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import orjson

from polar_proxy.conformance.profiles import HarnessProfile, say
from polar_proxy.conformance.recording_proxy import Exchange
from polar_proxy.conformance.scenarios import FaultKind, Finish, RunCommands, Scenario, Step
from polar_proxy.engines.scripted import Reply
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.sessions.client_metadata import NO_METADATA
from polar_proxy.sessions.rules import COMPACTION_REQUESTS, SIDE_CALLS, RequestTexts, match
from polar_proxy.types import ChatRequest, EngineRequest

Kind = Literal["main", "child", "compaction", "side"]

_CHILD_STEPS: tuple[Step, ...] = (RunCommands(), Finish())


@dataclass(slots=True)
class ReceivedRequest:
    """One request that reached the engine."""

    kind: Kind
    step: int
    """Number of the step that it asks for."""
    request: ChatRequest
    at: float
    fault: FaultKind | None = None


@dataclass(slots=True)
class ScriptedModel:
    """Script of one run. `slow` is how many seconds a slow first byte takes."""

    profile: HarnessProfile
    scenario: Scenario
    slow: float
    faults: dict[int, FaultKind] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))
    asked: list[ReceivedRequest] = field(default_factory=list)
    compacted: bool = False
    _fired: set[int] = field(default_factory=set)
    _cut: set[int] = field(default_factory=set)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.scenario.steps, *self.scenario.second)

    def instruction(self, turn: int) -> str:
        """What the user says in the first or second turn."""
        word = "Look around in this folder" if turn == 0 else "Look around once more"
        return f"{word}, change a.txt, and say when it is done (main-{self.nonce}, part {turn + 1})."

    def tag(self, step: int, kind: Kind = "main") -> str:
        return f"{'step' if kind == 'main' else 'cstep'}-{step}-{self.nonce}"

    def __call__(self, request: EngineRequest) -> Reply:
        if not isinstance(request, ChatRequest):
            return Reply("This is not a conversation.")
        kind, step = self._look(request)
        asked = ReceivedRequest(kind, step, request, time.time())
        self.asked.append(asked)
        if self.scenario.refuses:
            return Reply(error=self._refusal())
        if kind == "side":
            return Reply("{}" if request.response_format else "A small task")
        if kind == "compaction":
            self.compacted = True
            return Reply(self._summary(step))
        if kind == "child":
            return say(self.profile, _CHILD_STEPS[min(step, 1)], self.tag(step, "child"), "")
        return self._main(asked)

    def _main(self, asked: ReceivedRequest) -> Reply:
        step = asked.step
        taken = self.steps[step] if step < len(self.steps) else Finish()
        reply = say(self.profile, taken, self.tag(step), f"child-{self.nonce}", _agent_id(asked.request))
        if self.scenario.endless:
            return replace(reply, text="word " * 2000, calls=(), pace=0.1)
        if self.scenario.fills_context and step >= 1 and not self.compacted:
            if self.profile.context_error:
                return Reply(error=_too_long())
            return replace(reply, prompt_tokens=self.profile.full)
        fault = self.faults.get(step)
        if fault is None or step in self._fired:
            return reply
        self._fired.add(step)
        asked.fault = fault
        if fault == "slow":
            return replace(reply, wait=self.slow)
        if fault == "drop":
            return replace(reply, pace=0.1)
        message = "Too many requests at once." if fault == "429" else "The scripted engine broke."
        return Reply(error=EngineError(message, status=int(fault)))

    def cut_due(self, exchange: Exchange) -> bool:
        """Whether the answer to this request is to be broken by the front."""
        if "drop" not in self.faults.values() or len(exchange.body) > 1 << 22:
            return False
        text = exchange.body.decode(errors="replace")
        step = self._furthest(text, "main")
        if self.faults.get(step) != "drop" or step in self._cut or not self._is_main(text):
            return False
        self._cut.add(step)
        return True

    def _look(self, request: ChatRequest) -> tuple[Kind, int]:
        text = orjson.dumps([message.to_openai() for message in request.messages]).decode()
        view = RequestTexts.of(request.messages, request)
        if match(COMPACTION_REQUESTS, view, NO_METADATA) is not None:
            return "compaction", self._furthest(text, "main")
        tools = orjson.dumps(request.tools).decode()
        if match(SIDE_CALLS, view, NO_METADATA) is not None or not self._is_main(tools):
            return "side", 0
        users = [message for message in request.messages if message.role == "user"]
        if any(f"child-{self.nonce}" in orjson.dumps(message.content).decode() for message in users):
            return "child", self._furthest(text, "child")
        return "main", self._furthest(text, "main")

    def _is_main(self, text: str) -> bool:
        return f'"{self.profile.tool}"' in text if self.profile.tool else True

    def _furthest(self, text: str, kind: Kind) -> int:
        word = "step" if kind == "main" else "cstep"
        found = re.findall(rf"(?<![a-z]){word}-(\d+)-{self.nonce}", text)
        return max(map(int, found), default=-1) + 1

    def _summary(self, step: int) -> str:
        told = f"The user wants main-{self.nonce}; the last thing that was done is {self.tag(step - 1)}."
        return f"<analysis>Short.</analysis>\n<summary>\n<state_snapshot>\n{told}\n</state_snapshot>\n</summary>"

    def _refusal(self) -> RequestError | EngineError:
        status = self.profile.refusal
        if status == 401:
            return RequestError("Incorrect API key provided.", status=401, code="invalid_api_key")
        return EngineError("The scripted engine refuses every request.", status=status)


def _too_long() -> RequestError:
    text = "This model's maximum context length is 1000 tokens. Your messages resulted in 2000 tokens."
    return RequestError(text, code="context_length_exceeded")


def _agent_id(request: ChatRequest) -> str:
    """The id of a sub-agent, as the tool that started it told."""
    for message in reversed(request.messages):
        if message.role == "tool" and (found := re.search(r'"agent_id"\s*:\s*"([^"]+)"', str(message.content))):
            return found[1]
    return ""
