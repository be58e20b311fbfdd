"""A sequence that grows call by call: tokens in one buffer, with the spans that say where they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polar_proxy.traces.drift import DriftEvent
from polar_proxy.traces.grades import CANONICAL, grade_of, grade_reasons
from polar_proxy.traces.tokens import begins_with, common_prefix_length, share_buffer
from polar_proxy.types import CallRecord, Choice, Json, Span, TokenIds, Trace, new_id


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a builder made of a session's calls."""

    builder: str
    traces: tuple[Trace, ...]
    excluded: dict[str, str]
    """call id -> machine-readable reason"""
    on_drift: str | None = None
    """Of builder `merged`: split, canonical or rescore."""
    findings: tuple[DriftEvent, ...] = ()
    """Every drifted call of the session, and what was done about it."""
    why: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """trace id -> what its grade comes from (`grade.REASONS`)"""
    rescored_by: Json | None = None
    """The engine whose log-probabilities the rescored traces have."""


class TraceBuilder:
    """A trace in the making. `branch_at`: how many tokens of `parent`'s path come before its own (builder `tree`)."""

    def __init__(self, parent: TraceBuilder | None = None, branch_at: int = 0) -> None:
        self.trace_id = new_id("trc")
        self.parent = parent
        self.branch_at = branch_at
        self.children: list[TraceBuilder] = []
        self.spans: list[Span] = []
        self.calls: dict[str, None] = {}
        """Those that are trained here."""
        self.last: tuple[str, int] | None = None
        """(call, choice) whose answer ends it."""
        self.why: set[str] = set()
        self.prompt_length = 0
        self._known: TokenIds | None = None
        """The last call's prompt, if the path begins with it."""
        self._buffer: TokenIds = np.empty(256, dtype=np.int32)
        self._size = 0
        self._session_id = ""
        self._answers: list[tuple[int, Choice]] = []

    @property
    def ids(self) -> TokenIds:
        """Its own tokens. A view that later additions do not change."""
        return self._buffer[: self._size]

    @property
    def end(self) -> int:
        """Length of its whole path."""
        return self.branch_at + self._size

    @property
    def bent(self) -> bool:
        """Something in it stands behind other tokens than those that the model was given."""
        return CANONICAL in self.why

    def reach(self, prompt: TokenIds) -> int:
        """How many tokens of `prompt` are those of the path, given that the first `branch_at` are."""
        known, start = self._known, self.branch_at
        if known is not None and len(prompt) >= len(known) and share_buffer(prompt, known):
            start = len(known)
        return start + common_prefix_length(prompt[start:], self.ids[start - self.branch_at :])

    def is_start_of(self, prompt: TokenIds) -> bool:
        """Whether the prompt begins with all of it (of a line without parent)."""
        if self._size > len(prompt) or prompt[self._size - 1] != self._buffer[self._size - 1]:
            return False
        known = self._known
        if known is not None and share_buffer(prompt, known):
            return begins_with(prompt[len(known) :], self.ids[len(known) :])
        return begins_with(prompt, self.ids)

    def add(self, call: CallRecord, choice: Choice, start: int, *, bent: bool = False) -> None:
        """An answer, with what its prompt has from `start` on as context before it. `bent`: what stands before
        `start` in the prompt is not what stands in the line."""
        prompt = call.prompt_ids
        assert prompt is not None
        if bent:
            self.why.add(CANONICAL)
        if start < len(prompt):
            self.spans.append(Span("context", call.call_id, start, len(prompt)))
            self._append(prompt[start:])
        if self.last is None:
            self.prompt_length = self._size
            self._session_id = call.session_id
        self._known = None if self.bent else prompt
        self._answers.append((self._size, choice))
        self.spans.append(Span("sampled", call.call_id, 0, len(choice.token_ids), choice.index))
        self._append(choice.token_ids)
        self.calls[call.call_id] = None
        self.last = (call.call_id, choice.index)
        self.why |= grade_reasons(call, choice)

    def _append(self, piece: TokenIds) -> None:
        size = self._size + len(piece)
        if size > len(self._buffer):
            grown: TokenIds = np.empty(max(size, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._size] = self.ids
            self._buffer = grown
        self._buffer[self._size : size] = piece
        self._size = size

    def trace(self, builder: str, index: int, rollout_id: str | None, reward: float | None) -> Trace:
        mask = np.zeros(self._size, dtype=np.uint8)
        logprobs = np.full(self._size, np.nan, dtype=np.float32)
        for place, choice in self._answers:
            here = slice(place, place + len(choice.token_ids))
            mask[here] = 1
            logprobs[here] = choice.logprobs
        return Trace(
            trace_id=self.trace_id,
            session_id=self._session_id,
            rollout_id=rollout_id,
            builder=builder,
            index=index,
            prompt_length=self.prompt_length,
            token_ids=self.ids.copy(),
            loss_mask=mask,
            logprobs=logprobs,
            spans=tuple(self.spans),
            call_ids=tuple(self.calls),
            reward=reward,
            grade=grade_of(self.why),
            parent_trace_id=None if self.parent is None else self.parent.trace_id,
            branch_at=self.branch_at,
        )


def start_trace(call: CallRecord, choice: Choice) -> TraceBuilder:
    """A line of one answer behind its whole prompt."""
    line = TraceBuilder()
    line.add(call, choice, 0)
    return line


def finish_build(
    builder: str,
    lines: Sequence[TraceBuilder],
    excluded: dict[str, str],
    findings: Sequence[DriftEvent],
    rollout_id: str | None,
    reward: float | None,
    on_drift: str | None = None,
) -> BuildResult:
    """The lines as traces, in their order. Not yet accounted for."""
    return BuildResult(
        builder=builder,
        traces=tuple(line.trace(builder, index, rollout_id, reward) for index, line in enumerate(lines)),
        excluded=excluded,
        on_drift=on_drift,
        findings=tuple(findings),
        why={line.trace_id: tuple(sorted(line.why)) for line in lines},
    )
