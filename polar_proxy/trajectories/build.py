"""Builders: from the recorded calls of a session to training sequences.

Invariants, checked by `account` for every build and by property tests:

* every position with loss_mask 1 is one (call, choice, position) of a recorded completion, with its own
  log-probability; no sampled position is trained twice;
* every call is in exactly one place: it gave a sampled span to a trace, or it is excluded with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polar_proxy.types import CallRecord, Choice, Logprobs, Span, TokenIds, Trace, new_id

MISSING_LOGPROB = -9000.0
"""Engines write -9999 where they have no log-probability; nothing at or below this is evidence of a sample."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder made of a session's calls."""

    builder: str
    traces: tuple[Trace, ...]
    excluded: dict[str, str]
    """call id -> machine-readable reason"""


@dataclass(slots=True)
class _Open:
    """A trace that later calls may still continue."""

    ids: list[TokenIds]
    tail: TokenIds
    """All its tokens in one array."""
    spans: list[Span]
    logprobs: list[np.ndarray]
    masks: list[np.ndarray]
    calls: list[str]
    prompt_length: int
    marked: bool = False

    def add_context(self, call: CallRecord, start: int) -> None:
        prompt = call.prompt_ids
        assert prompt is not None
        if start < len(prompt):
            piece = prompt[start:]
            self.ids.append(piece)
            self.spans.append(Span("context", call.call_id, start, len(prompt)))
            self.masks.append(np.zeros(len(piece), dtype=np.uint8))
            self.logprobs.append(np.full(len(piece), np.nan, dtype=np.float32))

    def add_sampled(self, call: CallRecord, choice: Choice) -> None:
        self.ids.append(choice.token_ids)
        self.spans.append(Span("sampled", call.call_id, 0, len(choice.token_ids), choice.index))
        self.masks.append(np.ones(len(choice.token_ids), dtype=np.uint8))
        self.logprobs.append(choice.logprobs)
        self.tail = np.concatenate(self.ids)
        self.ids = [self.tail]
        if call.call_id not in self.calls:
            self.calls.append(call.call_id)
        self.marked = self.marked or _warped(call)


@dataclass(slots=True)
class _Work:
    opened: list[_Open] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)


def per_call(calls: Sequence[CallRecord], *, rollout_id: str | None = None, reward: float | None = None) -> Built:
    """One trace for each sampled choice: its prompt, then its answer. Always exact."""
    work = _Work(excluded=excluded_calls(calls))
    for call in _ordered(calls):
        if call.call_id in work.excluded:
            continue
        for choice in call.choices:
            work.opened.append(_fresh(call, choice))
    return _finish("per_call", calls, work, rollout_id, reward)


def merged(calls: Sequence[CallRecord], *, rollout_id: str | None = None, reward: float | None = None) -> Built:
    """Calls joined wherever a prompt begins, token for token, with all of an earlier trace; split otherwise.

    The longest such trace is continued, of equal ones that of the call's parent. A call whose prompt fits none opens a
    new trace (after a rewind, say, where the answer that was replaced stays trained in the old one): nothing is lost,
    and what stands in its prompt is context. Sub-agents and compacted conversations always open their own.
    """
    work = _Work(excluded=excluded_calls(calls))
    for call in _ordered(calls):
        if call.call_id in work.excluded:
            continue
        prompt, parent = call.prompt_ids, call.parent_call_id
        assert prompt is not None
        own = call.edge in ("subagent", "compacts")
        fits = [] if own else [trace for trace in work.opened if _begins_with(prompt, trace.tail)]
        longest = max(fits, key=lambda trace: (len(trace.tail), parent in trace.calls), default=None)
        for position, choice in enumerate(call.choices):
            if longest is not None and position == 0:
                longest.add_context(call, len(longest.tail))
                longest.add_sampled(call, choice)
            else:
                work.opened.append(_fresh(call, choice))
    return _finish("merged", calls, work, rollout_id, reward)


BUILDERS: dict[str, Callable[..., Built]] = {"per_call": per_call, "merged": merged}


def excluded_calls(calls: Sequence[CallRecord]) -> dict[str, str]:
    """call id -> why it cannot be trained on, for all calls of a session that cannot."""
    excluded = {call.call_id: reason for call in calls if (reason := exclusion(call)) is not None}
    for call_id in _superseded(calls, excluded):
        excluded[call_id] = "retry_of"
    return excluded


def _superseded(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[str]:
    """Answers to a request that was answered once more: of all attempts the agent went on from one.

    That one is the attempt that later calls refer to, or the last where none does."""
    first: dict[str, str] = {}
    attempts: dict[str, list[str]] = {}
    referred = {call.parent_call_id for call in calls if call.edge != "retries"}
    for call in _ordered(calls):
        parent = call.parent_call_id if call.edge == "retries" else None
        origin = first.get(parent, parent) if parent is not None else call.call_id
        first[call.call_id] = origin
        attempts.setdefault(origin, []).append(call.call_id)
    superseded: list[str] = []
    for group in attempts.values():
        usable = [call_id for call_id in group if call_id not in excluded]
        kept = {call_id for call_id in usable if call_id in referred} or set(usable[-1:])
        superseded += [call_id for call_id in usable if call_id not in kept]
    return superseded


def exclusion(call: CallRecord) -> str | None:
    """Why this call by itself cannot be trained on, or None."""
    if call.status != "ok":
        return call.status
    if call.edge == "side_call":
        return "side_call"
    sampled = [(len(choice.token_ids), len(choice.logprobs)) for choice in call.choices]
    if call.prompt_ids is None or not sampled or any(tokens == 0 or tokens != values for tokens, values in sampled):
        return "no_tokens"
    if not all(_reported(choice.logprobs) for choice in call.choices):
        return "no_logprobs"
    if _constrained(call):
        return "constrained"
    return None


def _reported(logprobs: Logprobs) -> bool:
    return bool(np.all(np.isfinite(logprobs) & (logprobs > MISSING_LOGPROB)))


def _constrained(call: CallRecord) -> bool:
    """Sampled under a grammar: the tokens were not the policy's own choice."""
    if (recorded := call.sampling.get("constrained")) is not None:
        return bool(recorded)
    # What Chat Completions asked for, before it was recorded whether it was enforced.
    form = call.params.get("response_format")
    choice = call.params.get("tool_choice")
    forced = choice == "required" or isinstance(choice, dict)
    return forced or (isinstance(form, dict) and form.get("type") not in (None, "text"))


def _warped(call: CallRecord) -> bool:
    """The recorded log-probabilities are of another distribution than the one that was sampled from."""
    sampling = call.sampling
    plain = (
        sampling.get("temperature") in (None, 1.0)
        and sampling.get("top_p") in (None, 1.0)
        and not sampling.get("top_k")  # 0: switched off
        and not sampling.get("min_p")
        and not sampling.get("presence_penalty")
        and not sampling.get("frequency_penalty")
        and not sampling.get("logit_bias")
    )
    return call.logprob_mode == "raw" and not plain


def _ordered(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return sorted(calls, key=lambda call: (call.started_at, call.call_id))


def _fresh(call: CallRecord, choice: Choice) -> _Open:
    assert call.prompt_ids is not None
    trace = _Open([], call.prompt_ids, [], [], [], [], len(call.prompt_ids))
    trace.add_context(call, 0)
    trace.add_sampled(call, choice)
    return trace


def _begins_with(prompt: TokenIds, tail: TokenIds) -> bool:
    n = len(tail)
    # The last token is compared first: it is where histories that only look alike differ.
    return n <= len(prompt) and prompt[n - 1] == tail[n - 1] and np.array_equal(prompt[:n], tail)


def _finish(
    builder: str, calls: Sequence[CallRecord], work: _Work, rollout_id: str | None, reward: float | None
) -> Built:
    traces = tuple(
        Trace(
            trace_id=new_id("trc"),
            session_id=next(call.session_id for call in calls if call.call_id == trace.calls[0]),
            rollout_id=rollout_id,
            builder=builder,
            index=index,
            prompt_length=trace.prompt_length,
            token_ids=trace.tail,
            loss_mask=np.concatenate(trace.masks),
            logprobs=np.concatenate(trace.logprobs),
            spans=tuple(trace.spans),
            call_ids=tuple(trace.calls),
            reward=reward,
            grade="marked" if trace.marked else "exact",
        )
        for index, trace in enumerate(work.opened)
    )
    built = Built(builder, traces, work.excluded)
    account(calls, built)
    return built


class AccountingError(AssertionError):
    """A builder lost or doubled something. This is a bug in Polar, never in the data."""


def account(calls: Sequence[CallRecord], built: Built) -> None:
    """Check that recorded = trained + excluded, call by call and token by token. Raises AccountingError."""
    by_id = {call.call_id: call for call in calls}
    trained: set[tuple[str, int]] = set()
    for trace in built.traces:
        _check_trace(trace, by_id, built.builder)
        for span in trace.spans:
            if span.kind == "sampled":
                key = (span.call_id, span.choice)
                if key in trained:
                    raise AccountingError(f"{built.builder}: choice {key} is trained twice")
                trained.add(key)
    if strange := set(built.excluded) - set(by_id):
        raise AccountingError(f"{built.builder}: calls that were never recorded are excluded: {sorted(strange)}")
    for call in by_id.values():
        given = {choice.index for choice in call.choices if (call.call_id, choice.index) in trained}
        if call.call_id in built.excluded:
            if given:
                raise AccountingError(f"{built.builder}: call {call.call_id} is both trained and excluded")
        elif not given or len(given) != len(call.choices):
            raise AccountingError(f"{built.builder}: call {call.call_id} is neither trained whole nor excluded")


def _check_trace(trace: Trace, calls: Mapping[str, CallRecord], builder: str) -> None:
    """The trace is what its spans say, position by position, and each sampled span is a whole choice."""
    n = len(trace.token_ids)
    if not n == len(trace.loss_mask) == len(trace.logprobs) == sum(span.end - span.start for span in trace.spans):
        raise AccountingError(f"{builder}: the spans of {trace.trace_id} do not tile its {n} tokens")
    position = 0
    heard: dict[str, None] = {}
    for span in trace.spans:
        call = calls.get(span.call_id)
        if call is None:
            raise AccountingError(f"{builder}: {trace.trace_id} has the call {span.call_id}, which was never recorded")
        here = slice(position, position + span.end - span.start)
        position = here.stop
        if span.kind == "context":
            source = call.prompt_ids
            right = not trace.loss_mask[here].any() and bool(np.isnan(trace.logprobs[here]).all())
        else:
            heard[span.call_id] = None
            choice = next((choice for choice in call.choices if choice.index == span.choice), None)
            if choice is None or (span.start, span.end) != (0, len(choice.token_ids)):
                raise AccountingError(f"{builder}: call {call.call_id} is not trained whole in {trace.trace_id}")
            source = choice.token_ids
            right = bool((trace.loss_mask[here] == 1).all()) and np.array_equal(trace.logprobs[here], choice.logprobs)
        if not right:
            raise AccountingError(f"{builder}: mask or log-probabilities of {trace.trace_id} are not those sampled")
        if source is None or not np.array_equal(trace.token_ids[here], source[span.start : span.end]):
            raise AccountingError(f"{builder}: tokens of {trace.trace_id} are not those of call {span.call_id}")
    if tuple(heard) != trace.call_ids:
        raise AccountingError(f"{builder}: {trace.trace_id} does not name the calls that it trains")
