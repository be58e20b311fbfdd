"""The builders without branches: `per_call` and `merged`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from polar_proxy.traces.canonical import find_context_start
from polar_proxy.traces.drift import DriftEvent, drift_events
from polar_proxy.traces.exclusions import excluded_calls, in_start_order
from polar_proxy.traces.trace_builder import BuildResult, TraceBuilder, finish_build, start_trace
from polar_proxy.traces.validation import validate
from polar_proxy.types import CallRecord

DriftPolicy = Literal["split", "canonical", "rescore"]


def per_call(calls: Sequence[CallRecord], *, rollout_id: str | None = None, reward: float | None = None) -> BuildResult:
    """One trace for each sampled choice: its prompt, then its answer. Always right, whatever the history did."""
    excluded = excluded_calls(calls)
    lines = [
        start_trace(call, choice)
        for call in in_start_order(calls)
        if call.call_id not in excluded
        for choice in call.choices
    ]
    drifted = mark_excluded(drift_events(calls, excluded), excluded)
    built = finish_build("per_call", lines, excluded, drifted, rollout_id, reward)
    validate(calls, built)
    return built


def merged(
    calls: Sequence[CallRecord],
    *,
    rollout_id: str | None = None,
    reward: float | None = None,
    on_drift: DriftPolicy = "split",
) -> BuildResult:
    """Calls joined wherever a prompt begins, token for token, with all of an earlier trace.

    The longest such trace is continued, of equal ones that of the call's base or parent. A call whose prompt fits none
    opens a new trace (after a rewind, say, where the answer that was replaced stays trained in the old one): nothing is
    lost, and what stands in its prompt is context. Sub-agents and compacted conversations always open their own.

    `on_drift` decides about drifted calls: `split` opens a new trace for them too; `canonical` joins them to their
    base's trace with the context of their own prompt (`canonical.py`), and splits where that cannot be done cleanly,
    with the reason in the finding; `rescore` makes the same traces, whose log-probabilities `rescore.rescore` fills in.
    """
    work = CallMerger(calls, on_drift)
    for call in in_start_order(calls):
        if call.call_id not in work.excluded:
            work.add(call)
    drifted = mark_excluded(tuple(work.findings.values()), work.excluded)
    built = finish_build("merged", work.lines, work.excluded, drifted, rollout_id, reward, on_drift)
    validate(calls, built)
    return built


class CallMerger:
    def __init__(self, calls: Sequence[CallRecord], on_drift: DriftPolicy) -> None:
        self.excluded = excluded_calls(calls)
        self.findings = {found.call_id: found for found in drift_events(calls, self.excluded)}
        self.lines: list[TraceBuilder] = []
        self._joins = on_drift != "split"
        self._calls = {call.call_id: call for call in calls}
        self._ending: dict[tuple[str, int], TraceBuilder] = {}
        """By the answer that ends them."""

    def add(self, call: CallRecord) -> None:
        prompt = call.prompt_ids
        assert prompt is not None
        line, start, bent = None, 0, False
        if call.edge not in ("subagent", "compacts"):
            if self._joins and (joined := self._joined(call)) is not None:
                (line, start), bent = joined, True
            else:
                base = (call.base_call_id, call.base_choice or 0)
                fits = [line for line in self.lines if line.is_start_of(prompt)]
                line = max(
                    fits,
                    key=lambda line: (line.end, line.last == base, call.parent_call_id in line.calls),
                    default=None,
                )
                start = 0 if line is None else line.end
        for position, choice in enumerate(call.choices):
            if line is None or position > 0:
                into = start_trace(call, choice)
                self.lines.append(into)
            else:
                into = line
                del self._ending[into.last]  # type: ignore[arg-type]
                into.add(call, choice, start, bent=bent)
            self._ending[(call.call_id, choice.index)] = into

    def _joined(self, call: CallRecord) -> tuple[TraceBuilder, int] | None:
        """The trace that a drifted call goes on with, or one whose base did not stand behind its own tokens, and where
        the context begins in the call's prompt."""
        found = self.findings.get(call.call_id)
        line = self._ending.get((call.base_call_id or "", call.base_choice or 0))
        if line is None:
            if found is not None:
                self.findings[call.call_id] = replace(found, split_reason="base_went_on")
            return None
        if found is None and not line.bent:
            return None
        base = self._calls[call.base_call_id or ""]
        start = find_context_start(line.ids, line.spans, call, base, drifted=found is not None)
        if isinstance(start, str):
            if found is not None:
                self.findings[call.call_id] = replace(found, split_reason=start)
            return None
        if found is not None:
            self.findings[call.call_id] = replace(found, outcome="canonical")
        return line, start


def mark_excluded(found: Sequence[DriftEvent], excluded: dict[str, str]) -> list[DriftEvent]:
    """A call that is not trained splits nothing."""
    return [replace(one, outcome="excluded") if one.call_id in excluded else one for one in found]
