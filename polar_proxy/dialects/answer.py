"""An engine's answer, gathered from its events and kept in this form until it is encoded or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from polar_proxy.types import Message, SampleEvent, ToolCall, TopLogprob


@dataclass(slots=True)
class AssistantDraft:
    """An assistant message under construction."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.text or self.reasoning or self.tool_calls)

    def build(self) -> Message:
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        content = text if text or not self.tool_calls else None
        return Message("assistant", content, reasoning or None, tuple(self.tool_calls))


@dataclass(slots=True)
class AnswerChoice(AssistantDraft):
    """One choice of an answer, as far as its events have arrived."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_sequence: str | None = None
    versions: list[tuple[int, str]] = field(default_factory=list)
    """(first position, policy version) of each run of tokens."""
    _message: Message | None = None

    @property
    def message(self) -> Message:
        """The choice as an assistant message; built once after the last event."""
        if self._message is None:
            self._message = self.build()
        return self._message

    def add(self, event: SampleEvent) -> None:
        self._message = None
        if event.text:
            self.text.append(event.text)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        if event.token_ids:
            version = event.weight_version
            if version is not None and (not self.versions or self.versions[-1][1] != version):
                self.versions.append((len(self.token_ids), version))
            self.token_ids.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
            self.tokens.extend(event.tokens)
            self.top.extend(event.top)
        for delta in event.tool_calls:
            while delta.index >= len(self.tool_calls):  # parallel calls may arrive in any order
                self.tool_calls.append(ToolCall("", "", ""))
            call = self.tool_calls[delta.index]
            self.tool_calls[delta.index] = replace(
                call,
                id=call.id or delta.id or "",
                name=call.name or delta.name or "",
                arguments=call.arguments + delta.arguments,
            )
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.stop_sequence = event.stop_sequence
        if event.versions:
            self.versions = list(event.versions)


@dataclass(slots=True)
class Answer:
    """The answer to one engine request."""

    prompt_ids: Sequence[int] | None = None
    cached_tokens: int | None = None
    choices: dict[int, AnswerChoice] = field(default_factory=dict)
    """By choice index."""
    usage: tuple[int, int] | None = None
    """As `SampleEvent.usage`; used only if the engine reports no token ids."""

    def add(self, event: SampleEvent) -> None:
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.usage is not None:
            self.usage = event.usage
        choice = self.choices.get(event.index)
        if choice is None:
            choice = self.choices[event.index] = AnswerChoice()
        choice.add(event)

    @property
    def first(self) -> AnswerChoice:
        """Choice 0, empty if it has no event yet. Most dialects have only one choice."""
        return self.choices.get(0) or AnswerChoice()

    @property
    def in_order(self) -> list[tuple[int, AnswerChoice]]:
        """The choices sorted by index."""
        return sorted(self.choices.items())

    @property
    def finished(self) -> bool:
        """True if there is a choice and all choices have a finish reason."""
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices.values())

    @property
    def prompt_tokens(self) -> int:
        if self.prompt_ids is None and self.usage is not None:
            return self.usage[0]
        return len(self.prompt_ids or ())

    @property
    def completion_tokens(self) -> int:
        sampled = sum(len(choice.token_ids) for choice in self.choices.values())
        return self.usage[1] if self.usage is not None and not sampled else sampled
