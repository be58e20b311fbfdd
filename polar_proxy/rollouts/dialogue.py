"""Dialogues: after each turn of the agent, the task's user sends a further message, until the user is done.

The user is a list of texts, or a model that plays a persona (`DialogueUser`). The agent's harness is started once for
each text of the user, so it must be able to resume its conversation. Promises:

* the agent's calls are ordinary calls of the rollout's session. The user's texts are only in the prompts of these
  calls, so they are never trained, even if a model sampled them;
* the calls of a model that plays the user are recorded in a separate session, which belongs to no rollout;
* a dialogue ends when the user is done, when the user has sent `RolloutSpec.max_user_turns` messages and the agent has
  answered the last one, or when the agent fails or runs out of time. The user's time does not count towards the agent's
  time limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx

from polar_proxy.gateway import Gateway
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from polar_proxy.tasks import DialogueUser
from polar_proxy.types import ANSWERED, Json
from sandboxes.base import ExecResult

DONE = "###STOP###"
"""The text with which a model that plays the user ends the dialogue."""
_ANSWER_SECONDS = 600.0
_LONGEST_TEXT = 30_000
"""Maximum number of characters of a text by a model that plays the user."""
_IDLE_SECONDS = 5.0
"""Seconds to wait, after the dialogue has ended, for a call to the user's model that is still in flight."""
_LEAST_SECONDS = 0.1
"""Least time limit of a turn, in seconds. If the agent's time is used up, its next turn gets this limit and ends as
timed out."""
_RULES = f"""
You talk to an agent that works for you on a computer. Write only what you say to it, in the first person and in a few
sentences. Answer its questions as the description above lets you, and do not do its work. When it has done what you
want, or cannot do it, write {DONE} and nothing else.
"""
_OPENING = "Hello! What can I do for you?"
"""The agent's first line in the conversation with the model that plays the user. There the agent has the role `user`,
which must speak first in most chat templates."""
_SIDE_EDGES = ("subagent", "side_call")


@dataclass(frozen=True, slots=True)
class DialogueMessage:
    speaker: Literal["user", "agent"]
    text: str

    def to_json(self) -> Json:
        return {"speaker": self.speaker, "text": self.text}


class UserPlayer(Protocol):
    async def answer(self, messages: Sequence[DialogueMessage]) -> str | None:
        """Return the user's next message, or None if the user is done. `messages` begins with the instruction."""
        ...


class ScriptedUser:
    """Says the given texts in order."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    async def answer(self, messages: Sequence[DialogueMessage]) -> str | None:
        del messages
        return next(self._texts, None)


@dataclass(frozen=True, slots=True)
class PlayedUser:
    """A model that plays a persona. The model is called through a gateway, which records the calls."""

    persona: str
    base_url: str
    key: str

    async def answer(self, messages: Sequence[DialogueMessage]) -> str | None:
        """Return the model's answer as the user. Raises InfrastructureError if the model cannot answer."""
        said = [{"role": "assistant" if one.speaker == "user" else "user", "content": one.text} for one in messages]
        request = {
            "model": "",  # that of the engine which the gateway chooses
            "messages": [
                {"role": "system", "content": f"{self.persona}\n{_RULES}"},
                {"role": "user", "content": _OPENING},
                *said,
            ],
        }
        try:
            async with httpx.AsyncClient(timeout=_ANSWER_SECONDS) as client:
                headers = {"authorization": f"Bearer {self.key}"}
                reply = await client.post(f"{self.base_url}/v1/chat/completions", json=request, headers=headers)
                reply.raise_for_status()
        except httpx.HTTPError as error:
            raise InfrastructureError("engine", f"the model that plays the user did not answer: {error}") from error
        text = str(reply.json()["choices"][0]["message"].get("content") or "")
        text = text.replace("\0", "")[:_LONGEST_TEXT]  # a command line holds no more
        return None if DONE in text or not text.strip() else text


@contextlib.asynccontextmanager
async def open_user(user: DialogueUser, rollout_id: str, store: Store, gateway: Gateway) -> AsyncIterator[UserPlayer]:
    """Yield the user of one rollout. A model that plays a persona gets a session at the gateway until the block ends.

    The label of this session is `user of ROLLOUT`. A rule in the setting `routes` may match the label, and so send the
    calls of the model to another engine.
    """
    if user.persona is None:
        yield ScriptedUser(user.texts)
        return
    key = new_key()
    label = f"user of {rollout_id}"
    session = await store.sessions.create(key_hash=hash_key(key), label=label, origin="user")
    try:
        yield PlayedUser(user.persona, gateway.url, key)
    finally:
        await store.sessions.close(session.session_id)
        gateway.end_session(session.session_id)
        await gateway.forget_session(session.session_id, _IDLE_SECONDS)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The agent's work on one task: a single run or, in a dialogue, one run for each message of the user."""

    last: ExecResult
    output: bytes
    """stdout and stderr of all runs."""
    messages: tuple[DialogueMessage, ...] = ()
    """Messages of both sides of a dialogue."""
    end: str = ""
    """Why the dialogue ended."""


RunAgent = Callable[[str, bool, float], Awaitable[ExecResult]]
"""Function that runs the agent on a message of the user. Arguments: the message, whether to resume the conversation,
and the time limit in seconds."""


async def play_dialogue(
    instruction: str,
    user: UserPlayer,
    run_agent: RunAgent,
    last_answer: Callable[[], Awaitable[str]],
    succeeded: Callable[[ExecResult], bool],
    *,
    max_turns: int,
    seconds: float,
) -> AgentRun:
    """Play a dialogue that begins with the instruction. `seconds` limits the agent's time in total."""
    messages = [DialogueMessage("user", instruction)]
    output = b""
    for turn in range(max_turns):
        last = await run_agent(messages[-1].text, turn > 0, max(seconds, _LEAST_SECONDS))
        seconds -= last.seconds
        output += last.stdout + last.stderr
        if not succeeded(last):
            return AgentRun(last, output, tuple(messages), "the agent's turn failed")
        messages.append(DialogueMessage("agent", await last_answer()))
        text = await user.answer(messages) if turn + 1 < max_turns else None
        if text is None:
            break
        messages.append(DialogueMessage("user", text))
    end = f"the limit of {max_turns} turns" if turn + 1 == max_turns else "the user is done"
    return AgentRun(last, output, tuple(messages), end)


async def read_last_answer(store: Store, session_id: str) -> str:
    """Return the text of the last answer in the agent's main conversation."""
    calls = await store.calls.summaries(session_id)
    main = [call for call in calls if call.status in ANSWERED and call.edge not in _SIDE_EDGES]
    record = await store.calls.get(main[-1].call_id) if main else None
    content = record.choices[0].message.content if record is not None and record.choices else None
    return content if isinstance(content, str) else ""
