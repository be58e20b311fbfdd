"""Builder `tree`: a whole session as a forest in which no token is stored twice that need not be.

A trace holds only its own tokens; `parent_trace_id` and `branch_at` say how many tokens of the parent's whole path come
before them, and `prompt_length` counts what it has of its own first prompt. Siblings, rewinds, parallel answers and
sub-agents share what they begin with, be it only the system prompt.

Invariants, checked by `validate`: the path up to a sampled span is, token for token, the prompt that the model was
given, and no answer is in two traces. So a response that several leaves go on from is trained once.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar_proxy.traces.builders import mark_excluded
from polar_proxy.traces.drift import drift_events
from polar_proxy.traces.exclusions import excluded_calls, in_start_order
from polar_proxy.traces.paths import TracePath, trace_path
from polar_proxy.traces.trace_builder import BuildResult, TraceBuilder, finish_build
from polar_proxy.traces.validation import validate
from polar_proxy.types import CallRecord, TokenIds

__all__ = ["TracePath", "trace_path", "tree"]


def tree(calls: Sequence[CallRecord], *, rollout_id: str | None = None, reward: float | None = None) -> BuildResult:
    """Each prompt is laid along the deepest path that it shares tokens with, and branches where it parts.

    A call whose prompt begins with a whole path goes on in the trace that ends it, unless it is a sub-agent's or of a
    compacted conversation; of its choices, those behind the first branch.
    """
    excluded = excluded_calls(calls)
    lines: list[TraceBuilder] = []
    for call in in_start_order(calls):
        prompt = call.prompt_ids
        if call.call_id in excluded or prompt is None:
            continue
        own = call.edge in ("subagent", "compacts")
        for position, choice in enumerate(call.choices):
            line, depth = _deepest(lines, prompt, call)
            if line is None or own or position > 0 or depth < line.end:
                line = _branch(line, depth)
                lines.append(line)
            line.add(call, choice, depth)
    built = finish_build(
        "tree", lines, excluded, mark_excluded(drift_events(calls, excluded), excluded), rollout_id, reward
    )
    validate(calls, built)
    return built


def _deepest(lines: Sequence[TraceBuilder], prompt: TokenIds, call: CallRecord) -> tuple[TraceBuilder | None, int]:
    """The trace that has the last of the tokens which the prompt shares with a path, and their number.

    Of several as deep, one that ends there, then that of the call's base, then of its parent, then the first."""
    base = (call.base_call_id, call.base_choice or 0)
    best: TraceBuilder | None = None
    best_key = (0, False, False, False)
    reached = [line for line in reversed(lines) if line.parent is None]
    while reached:
        line = reached.pop()
        depth = line.reach(prompt)
        if depth > line.branch_at:
            key = (depth, depth == line.end, line.last == base, call.parent_call_id in line.calls)
            if key > best_key:
                best, best_key = line, key
        reached += [child for child in reversed(line.children) if child.branch_at <= depth]
    return best, best_key[0]


def _branch(parent: TraceBuilder | None, depth: int) -> TraceBuilder:
    line = TraceBuilder(parent, depth)
    if parent is not None:
        parent.children.append(line)
    return line
