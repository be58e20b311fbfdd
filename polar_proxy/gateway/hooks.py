"""Hooks: the user's code that changes requests before they are sampled, and answers before agents get them.

A hook is a Python class that is named on the command line or in the settings (`gateway.hooks`), never in a request or a
task. It has one or more of these methods, plain or async. Each returns a replacement for its first argument,
or None to change nothing:

    def on_request(self, request: EngineRequest, call: HookedCall) -> EngineRequest | None
    def on_answer(self, answer: Message, call: HookedCall) -> Message | None
    def on_tool_call(self, tool_call: ToolCall, call: HookedCall) -> ToolCall | None

Promises:

* The record of a call has the request as the agent sent it and the answer as the agent got it. If hooks changed them,
  `calls.hooks` has the changed parts of the request as the model saw them, and the answer as it was sampled.
* The sampled tokens of an answer that a hook changed are never trained. No later prompt continues them, because the
  agent sends the changed text back.
* If a hook changed the messages of a request, the engine renders the prompt from the changed messages, and the answer
  is trained with this prompt.
* If a hook fails or takes longer than `gateway.hook_seconds`, its call fails, and the agent gets an error in the format
  of its API. Each kind of failure is logged once.
* Plain methods run in a thread, so that they cannot stop the event loop. With `on_answer` or `on_tool_call`, an answer
  is not streamed, but sent when it is complete.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import orjson

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.dialects.base import Answer, AnswerChoice
from polar_proxy.errors import BadTaskError, RequestError, UsageError
from polar_proxy.types import EngineRequest, Json, Message, SampleEvent, Usage

log = logging.getLogger(__name__)

V = TypeVar("V")

_METHODS = ("on_request", "on_answer", "on_tool_call")


@dataclass(frozen=True, slots=True)
class HookedCall:
    """The call that a hook is about to change."""

    call_id: str
    session_id: str
    label: str | None
    """The session's label."""
    dialect: str
    model: str
    """The model that the agent named."""


class HookError(RequestError):
    """A hook failed. The reason is logged, but not sent to the agent, which is untrusted."""

    def __init__(self, method: str) -> None:
        text = f"The hook {method} of this server failed, so the call is not answered. The server's log says why."
        super().__init__(text, status=500, code="hook_failed")


class Hooks:
    """The hooks of one gateway. If the settings name no hooks, requests and answers stay unchanged."""

    def __init__(self, name: str | None, seconds: float) -> None:
        """`name`: a class, as module:Class. Raises UsageError if it cannot be used."""
        self._seconds = seconds
        self._logged: set[tuple[str, str]] = set()
        instance = None if name is None else _instance(name)
        self._methods = {method: found for method in _METHODS if (found := getattr(instance, method, None)) is not None}
        if name is not None and not self._methods:
            raise UsageError(
                f"The class {name} has none of the methods of hooks: {', '.join(_METHODS)}. Add one of them."
            )

    @property
    def changes_answers(self) -> bool:
        """Whether the hooks may change answers. If so, an answer is sent only when it is complete."""
        return "on_answer" in self._methods or "on_tool_call" in self._methods

    async def change_request(self, request: EngineRequest, call: HookedCall) -> EngineRequest:
        """Return the request as the model shall see it. Raises HookError if the hook fails."""
        return await self._apply("on_request", request, call)

    async def change_answer(self, answer: Answer, call: HookedCall) -> Answer:
        """Return the answer as the agent shall get it; the same object if nothing was changed.

        Raises HookError if a hook fails.
        """
        choices: dict[int, AnswerChoice] = {}
        for index, choice in answer.in_order:
            message = await self._apply("on_answer", choice.message, call)
            calls = tuple([await self._apply("on_tool_call", one, call) for one in message.tool_calls])
            message = replace(message, tool_calls=calls)
            choices[index] = choice if message == choice.message else _choice_of(message, choice)
        if all(choices[index] is choice for index, choice in answer.choices.items()):
            return answer
        usage = answer.usage or Usage(answer.prompt_tokens, answer.completion_tokens)
        return replace(answer, choices=choices, usage=usage)

    async def _apply(self, method: str, value: V, call: HookedCall) -> V:
        hook = self._methods.get(method)
        if hook is None:
            return value
        try:
            async with asyncio.timeout(self._seconds):
                changed = await _run(hook, value, call)
        except TimeoutError as error:
            raise self._failed(method, f"it took longer than {self._seconds:g} s", error) from None
        except Exception as error:  # noqa: BLE001 (logged and sent as an error)
            raise self._failed(method, f"{type(error).__name__}: {error}", error) from None
        if changed is None:
            return value
        if not isinstance(changed, type(value)):
            problem = f"it returned {type(changed).__name__} in place of {type(value).__name__} or None"
            raise self._failed(method, problem, TypeError(problem))
        return changed

    def _failed(self, method: str, problem: str, error: Exception) -> HookError:
        if (method, type(error).__name__) not in self._logged:
            self._logged.add((method, type(error).__name__))
            log.error("the hook %s failed; calls for which it fails are refused: %s", method, problem, exc_info=error)
        return HookError(method)


def request_changes(sent: EngineRequest, seen: EngineRequest) -> Json:
    """Return the parts of a request that a hook changed, as the model saw them; empty if it changed nothing.

    Of the messages, only the changed ones are listed, each with its position; `message_count` counts all of them.
    """
    changed: Json = {}
    if seen is sent:
        return changed
    for field in fields(seen):
        before, after = getattr(sent, field.name), getattr(seen, field.name)
        if before == after or field.name == "large":
            continue
        if field.name == "messages":
            differ = [
                {"position": position, "message": message.to_openai()}
                for position, message in enumerate(after)
                if position >= len(before) or before[position] != message
            ]
            changed |= {"messages": differ, "message_count": len(after)}
        else:
            changed[field.name] = after
    plain: Json = orjson.loads(orjson.dumps(changed))  # lists in place of tuples, objects in place of dataclasses
    return plain


def events_of(answer: Answer) -> Sequence[SampleEvent]:
    """Return a complete answer as one event for each choice, without the finish reasons."""
    return [
        replace(choice.as_event(index), prompt_ids=answer.prompt_ids, cached_tokens=answer.cached_tokens)
        for index, choice in answer.in_order
    ]


def _choice_of(message: Message, sampled: AnswerChoice) -> AnswerChoice:
    """Return a choice with the changed message, and without the tokens that were sampled."""
    reason = sampled.finish_reason
    if reason in ("stop", "tool_calls"):
        reason = "tool_calls" if message.tool_calls else "stop"
    return AnswerChoice(
        text=[message.content] if isinstance(message.content, str) else [],
        reasoning=[message.reasoning] if message.reasoning else [],
        tool_calls=list(message.tool_calls),
        finish_reason=reason,
    )


def _instance(name: str) -> object:
    try:
        return AllowedCode().including(name).load(name)()
    except BadTaskError as error:
        raise UsageError(f"The hooks cannot be used: {error}. Give a class as module:Class.") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"The hooks {name} cannot be used, because loading the class failed: {problem}.") from error


async def _run(hook: Callable[..., Any], value: object, call: HookedCall) -> Any:
    if inspect.iscoroutinefunction(hook):
        return await hook(value, call)
    return await asyncio.to_thread(hook, value, call)
