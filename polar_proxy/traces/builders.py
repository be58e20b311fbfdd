"""Builders: from the recorded calls of a session to traces, the training sequences. Pure.

per_call  one trace for each sampled answer: the prompt of the answer's call, then the answer. Correct for any history
merged    a call is joined to an earlier trace if the call's prompt begins with all tokens of the trace
tree      a forest that stores common prefixes once: a trace holds only its own tokens, and `parent_trace_id` names its
          parent. The trace's own tokens follow the first `branch_at` tokens of the parent's path from the root

Every builder validates its result (`validation.validate`). Each answer is in exactly one trace, unless its call is
excluded with a reason. Each sampled token follows the prompt from which it was sampled, except in a trace to which
`on_drift` joined a drifted call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from polar_proxy.errors import UsageError
from polar_proxy.sequences import answer_sampling, begins_with, common_prefix_length, shared_length
from polar_proxy.traces.certificate import ScorerIdentity
from polar_proxy.traces.drift import DriftEvent, DriftPolicy, drift_events, find_context_start
from polar_proxy.traces.grades import excluded_calls, grade_of, grade_reasons, in_start_order
from polar_proxy.traces.prefixes import PrefixTable
from polar_proxy.traces.validation import validate
from polar_proxy.types import AnswerSampling, CallRecord, Choice, Span, TokenIds, Trace, new_id

BUILDERS = ("per_call", "merged", "tree")
ON_DRIFT: tuple[DriftPolicy, ...] = get_args(DriftPolicy)
_NEW_TRACE_EDGES = ("subagent", "compacts")
"""A call with one of these values of `CallRecord.edge` never continues the trace of another call."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The traces of a session's calls, and the calls that are in no trace."""

    builder: str
    traces: tuple[Trace, ...]
    excluded: Mapping[str, str]
    """call id -> machine-readable reason"""
    on_drift: str | None = None
    """The drift policy of the builder `merged` or `rescored`; None for other builders, which have no drift policy."""
    drift_events: tuple[DriftEvent, ...] = ()
    """Every drifted call of the session, with the builder's treatment of it."""
    grade_reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """trace id -> the reasons for its grade"""
    rescored_by: ScorerIdentity | None = None
    """The engine that computed the log-probabilities of the rescored traces."""


def build(
    calls: Sequence[CallRecord],
    builder: str = "merged",
    *,
    on_drift: str = "split",
    rollout_id: str | None = None,
    reward: float | None = None,
) -> BuildResult:
    """Build and validate the traces of a session's calls.

    `on_drift` decides what `merged` does with a drifted call (see `drift.py`). `split` opens a new trace for it.
    A drifted call continues the answer of an earlier call, its base. `canonical` joins the drifted call to the trace
    of the base: the context between the two answers is taken from the drifted call's own prompt. If no clean join
    exists, `canonical` splits, and the drift event has the reason. `rescore` makes the same traces as `canonical`;
    `scoring.rescore` then replaces their log-probabilities. Raise UsageError for an unknown builder or drift policy.
    """
    if builder not in BUILDERS:
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join(BUILDERS)}.")
    if on_drift not in ON_DRIFT:
        raise UsageError(f"There is no drift policy {on_drift!r}: choose {', '.join(ON_DRIFT)}.")
    if builder != "merged" and on_drift != "split":
        raise UsageError(f"--on-drift is for the builder merged: {builder} joins no drifted calls.")
    excluded = excluded_calls(calls)
    trained = [call for call in in_start_order(calls) if call.call_id not in excluded]
    events = {event.call_id: event for event in drift_events(calls, excluded)}
    if builder == "per_call":
        traces = [TraceBuilder.of_answer(call, choice) for call in trained for choice in call.choices]
    elif builder == "tree":
        traces = _tree(trained)
    else:
        merger = CallMerger(calls, events, joins_drift=on_drift != "split")
        for call in trained:
            merger.add(call)
        traces, events = merger.traces, merger.events
    result = BuildResult(
        builder=builder,
        traces=tuple(trace.finish(builder, index, rollout_id, reward) for index, trace in enumerate(traces)),
        excluded=excluded,
        on_drift=on_drift if builder == "merged" else None,
        drift_events=tuple(events.values()),
        grade_reasons={trace.trace_id: tuple(sorted(trace.reasons)) for trace in traces},
    )
    validate(calls, result)
    return result


# ---------------------------------------------------------------- joining


class CallMerger:
    """Builder `merged`: a call continues the longest trace whose tokens are a prefix of the call's prompt.

    Among equally long traces, the call continues the trace of its base or its parent. If no trace is a prefix, for
    example after a rewind, the call opens a new trace. An answer that a rewind replaced is still trained, in the old
    trace. Calls of sub-agents and of compacted conversations always open a new trace.
    """

    def __init__(self, calls: Sequence[CallRecord], events: Mapping[str, DriftEvent], *, joins_drift: bool) -> None:
        """`events`: call id -> drift event. `joins_drift`: join drifted calls where possible (`_join_drifted`)."""
        self.traces: list[TraceBuilder] = []
        self.events = dict(events)
        """The drift events, with the outcome or the split reason of each call that was added."""
        self._joins_drift = joins_drift
        self._calls = {call.call_id: call for call in calls}
        self._by_last_answer: dict[tuple[str, int], TraceBuilder] = {}
        self._prefixes = PrefixTable()
        self._numbers: dict[TraceBuilder, int] = {}
        """Index of each trace in `traces`; the trace has the same number in `_prefixes`."""

    def add(self, call: CallRecord) -> None:
        """Add the call's first answer to the trace that the call continues, or to a new trace. Open a new trace for
        each further answer."""
        first, *others = call.choices
        may_continue = call.edge not in _NEW_TRACE_EDGES
        if may_continue and self._joins_drift and (joined := self._join_drifted(call)) is not None:
            trace, start = joined
            self._extend(trace, call, first, start, joins_drift=True)
        elif may_continue and (continued := self._continued_trace(call)) is not None:
            self._extend(continued, call, first, continued.end)
        else:
            self._open(call, first)
        for choice in others:
            self._open(call, choice)

    def _open(self, call: CallRecord, choice: Choice) -> None:
        trace = TraceBuilder()
        self._numbers[trace] = len(self.traces)
        self.traces.append(trace)
        self._extend(trace, call, choice, 0)

    def _extend(
        self, trace: TraceBuilder, call: CallRecord, choice: Choice, start: int, *, joins_drift: bool = False
    ) -> None:
        size = trace.end
        if trace.last_answer is not None:
            del self._by_last_answer[trace.last_answer]
        trace.add(call, choice, start, joins_drift=joins_drift)
        self._by_last_answer[(call.call_id, choice.index)] = trace
        self._prefixes.extend(self._numbers[trace], trace.token_ids[size:])

    def _continued_trace(self, call: CallRecord) -> TraceBuilder | None:
        """Return the longest trace of the call's engine that is a prefix of the call's prompt, or None."""
        assert call.prompt_ids is not None
        base = (call.base_call_id, call.base_choice or 0)
        candidates = (self.traces[number] for number in self._prefixes.candidates(call.prompt_ids))
        return max(
            (trace for trace in candidates if trace.has_engine_of(call) and trace.is_prefix_of(call.prompt_ids)),
            key=lambda trace: (trace.end, trace.last_answer == base, call.parent_call_id in trace.calls),
            default=None,
        )

    def _join_drifted(self, call: CallRecord) -> tuple[TraceBuilder, int] | None:
        """Return the trace to which a call is joined although the call's prompt does not begin with the trace's tokens.
        Also return the position in the prompt where the context of the new answer begins.

        There are two such cases: the call drifted, or an earlier drifted call was joined to the trace. In all other
        cases, and if no clean join exists, return None. If the call drifted, set the outcome or the split reason of its
        drift event.
        """
        event = self.events.get(call.call_id)
        trace = self._by_last_answer.get((call.base_call_id or "", call.base_choice or 0))
        if event is None and (trace is None or not trace.has_drift):
            return None
        start: int | str  # the position, or the reason why there is no clean join
        if trace is None:
            start = "base_went_on"
        elif not trace.has_engine_of(call):
            start = "other_engine"
        else:
            base = self._calls[call.base_call_id or ""]
            start = find_context_start(trace.token_ids, trace.spans, call, base, drifted=event is not None)
        if event is not None:
            result = {"split_reason": start} if isinstance(start, str) else {"outcome": "canonical"}
            self.events[call.call_id] = event.model_copy(update=result)
        return None if trace is None or isinstance(start, str) else (trace, start)


def _tree(calls: Sequence[CallRecord]) -> list[TraceBuilder]:
    """Add each answer to the path that shares the longest prefix with its prompt. Branch where path and prompt differ.

    Siblings, rewinds, parallel answers and sub-agents share their common prefix. A call whose prompt begins with a
    whole path continues the trace at the end of that path, unless it is the call of a sub-agent or of a compacted
    conversation. Each further choice of a call begins a branch. An answer that several paths continue is trained once.
    """
    traces: list[TraceBuilder] = []
    for call in calls:
        for position, choice in enumerate(call.choices):
            trace, depth = _deepest(traces, call)
            if trace is None or call.edge in _NEW_TRACE_EDGES or position > 0 or depth < trace.end:
                trace = TraceBuilder(trace, depth)
                traces.append(trace)
            trace.add(call, choice, depth)
    return traces


def _deepest(traces: Sequence[TraceBuilder], call: CallRecord) -> tuple[TraceBuilder | None, int]:
    """Return the trace that shares the longest prefix with the call's prompt, and the prefix's length.

    Among equally long prefixes, prefer a trace that ends with this prefix, then a trace whose last answer the call
    extends (the call's base), then a trace that contains the call's parent, then the first. Traces of other engines do
    not count. Return (None, 0) if no trace shares a token with the prompt.
    """
    prompt = call.prompt_ids
    assert prompt is not None
    base = (call.base_call_id, call.base_choice or 0)
    best: TraceBuilder | None = None
    best_key = (0, False, False, False)
    reached = [trace for trace in reversed(traces) if trace.parent is None and trace.has_engine_of(call)]
    while reached:
        trace = reached.pop()
        depth = trace.shared_depth(prompt)
        if depth > trace.branch_at:
            key = (depth, depth == trace.end, trace.last_answer == base, call.parent_call_id in trace.calls)
            if key > best_key:
                best, best_key = trace, key
        reached += [child for child in reversed(trace.children) if child.branch_at <= depth]
    return best, best_key[0]


class TraceBuilder:
    """A trace that grows answer by answer: tokens in one buffer, and spans that say which call each token is from."""

    def __init__(self, parent: TraceBuilder | None = None, branch_at: int = 0) -> None:
        """`branch_at`: this trace's own tokens follow the first `branch_at` tokens of the parent's path from the root
        (builder `tree`)."""
        self.trace_id = new_id("trc")
        self.parent = parent
        self.branch_at = branch_at
        self.children: list[TraceBuilder] = []
        self.spans: list[Span] = []
        self.calls: dict[str, None] = {}
        """Ids of the calls whose answers the trace contains, in order."""
        self.last_answer: tuple[str, int] | None = None
        """(call id, choice index) of the trace's last answer."""
        self.reasons: set[str] = set()
        self.prompt_length = 0
        self._last_prompt: TokenIds | None = None
        """The prompt of the last call; None without a call, or if the trace does not begin with this prompt."""
        self._buffer: TokenIds = np.empty(256, dtype=np.int32)
        self._size = 0
        self._session_id = ""
        self._engine_name: str | None = None
        self._answers: list[tuple[int, Choice]] = []
        self._sampling: list[AnswerSampling] = []
        if parent is not None:
            parent.children.append(self)

    @classmethod
    def of_answer(cls, call: CallRecord, choice: Choice) -> TraceBuilder:
        """Begin a trace with one answer after its whole prompt."""
        trace = cls()
        trace.add(call, choice, 0)
        return trace

    @property
    def token_ids(self) -> TokenIds:
        """A view of this trace's own tokens, without the path before them. Tokens added later are not in the view."""
        return self._buffer[: self._size]

    @property
    def end(self) -> int:
        """Number of tokens of the whole path, from the root to the end of this trace."""
        return self.branch_at + self._size

    @property
    def has_drift(self) -> bool:
        """True if the tokens before an answer in this trace differ from the prompt recorded for this answer."""
        return "canonical" in self.reasons

    def has_engine_of(self, call: CallRecord) -> bool:
        """Return whether one engine sampled both the trace's answers and the call's answers."""
        return self._engine_name == call.engine_name

    def shared_depth(self, prompt: TokenIds) -> int:
        """Return the length of the common prefix of the prompt and the trace's whole path from the root.

        Call it only if the first `branch_at` tokens are known to be equal.
        """
        start = max(self.branch_at, shared_length(prompt, self._last_prompt))
        return start + common_prefix_length(prompt[start:], self.token_ids[start - self.branch_at :])

    def is_prefix_of(self, prompt: TokenIds) -> bool:
        """Return whether the prompt begins with all tokens of this trace. Only for traces without a parent."""
        if self._size > len(prompt) or prompt[self._size - 1] != self._buffer[self._size - 1]:
            return False
        start = shared_length(prompt, self._last_prompt)
        return begins_with(prompt[start:], self.token_ids[start:])

    def add(self, call: CallRecord, choice: Choice, start: int, *, joins_drift: bool = False) -> None:
        """Append the call's prompt from position `start` on, as context, and then its answer.

        `joins_drift`: the first `start` tokens of the prompt differ from the trace's tokens so far.
        """
        prompt = call.prompt_ids
        assert prompt is not None
        if joins_drift:
            self.reasons.add("canonical")
        if start < len(prompt):
            self.spans.append(Span("context", call.call_id, start, len(prompt)))
            self._append(prompt[start:])
        if self.last_answer is None:
            self.prompt_length = self._size
            self._session_id = call.session_id
            self._engine_name = call.engine_name
        self._last_prompt = None if self.has_drift else prompt
        self._answers.append((self._size, choice))
        sampling = answer_sampling(call, choice)
        self._sampling.append(sampling)
        self.spans.append(Span("sampled", call.call_id, 0, len(choice.token_ids), choice.index))
        self._append(choice.token_ids)
        self.calls[call.call_id] = None
        self.last_answer = (call.call_id, choice.index)
        self.reasons |= grade_reasons(call, sampling)

    def _append(self, piece: TokenIds) -> None:
        size = self._size + len(piece)
        if size > len(self._buffer):
            grown: TokenIds = np.empty(max(size, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._size] = self.token_ids
            self._buffer = grown
        self._buffer[self._size : size] = piece
        self._size = size

    def finish(self, builder: str, index: int, rollout_id: str | None, reward: float | None) -> Trace:
        mask = np.zeros(self._size, dtype=np.uint8)
        logprobs = np.full(self._size, np.nan, dtype=np.float32)
        for position, choice in self._answers:
            here = slice(position, position + len(choice.token_ids))
            mask[here] = 1
            logprobs[here] = choice.logprobs
        return Trace(
            trace_id=self.trace_id,
            session_id=self._session_id,
            rollout_id=rollout_id,
            builder=builder,
            index=index,
            prompt_length=self.prompt_length,
            token_ids=self.token_ids.copy(),
            loss_mask=mask,
            logprobs=logprobs,
            spans=tuple(self.spans),
            call_ids=tuple(self.calls),
            reward=reward,
            grade=grade_of(self.reasons),
            parent_trace_id=None if self.parent is None else self.parent.trace_id,
            branch_at=self.branch_at,
            sampling=tuple(self._sampling),
        )
