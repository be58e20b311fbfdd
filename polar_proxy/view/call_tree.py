"""The tree of a session's calls as a drawing beside a list: one row per call, one lane per line of conversation.

A call that continues the newest call of a lane is drawn in this lane. Every other call opens a lane, as a branch does
in the graph of a version control system. A lane is free for another branch when no later call is drawn in the lane or
has its parent in the lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polar_proxy.sessions.lineage_reasons import reason_of
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.types import Edge

ROW = 28
"""Height of a row in pixels, the same as `--row` in polar.css. `LANE` is the width of a lane."""
LANE = 16
_MARGIN = 12
_STAYS: frozenset[Edge] = frozenset({"continues", "compacts"})


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A call in the drawing."""

    number: int
    """Position of the call in the session by its start, from 1."""
    call: CallSummary
    x: int
    y: int
    parent_number: int | None
    reason: str | None
    """The rule that gave the call its edge, in words."""

    @property
    def seconds(self) -> float:
        return self.call.ended_at - self.call.started_at


@dataclass(frozen=True, slots=True)
class TreeLine:
    """The line from a call's parent to the call, as the path of an SVG."""

    edge: Edge
    path: str


@dataclass(frozen=True, slots=True)
class CallTree:
    """The drawn calls of a session: all, or one page of them."""

    call_count: int
    """Number of calls of the session."""
    rows: Sequence[TreeRow]
    lines: Sequence[TreeLine]
    width: int
    top: int
    height: int
    earlier: str | None
    """Id of the call before the first drawn one; None if there is none."""
    later: str | None
    """Id of the call after the last drawn one; None if there is none."""


@dataclass(slots=True)
class Branch:
    """A chain of calls, each of which continues the one before. All fields but `lane` are positions in the session."""

    first: int
    newest: int
    last_use: int
    """Position of the last call that is in the branch or has its parent there."""
    lane: int = 0


def draw_tree(calls: Sequence[CallSummary], chosen: str | None = None, page_size: int | None = None) -> CallTree:
    """Draw the calls of a session, ordered by start: all, or the page of `page_size` calls that contains the call
    `chosen`."""
    positions = {call.call_id: position for position, call in enumerate(calls)}
    parents = [_parent(positions, call) for call in calls]
    lanes = _lanes(calls, parents)
    rows = [
        TreeRow(
            position + 1,
            call,
            _MARGIN + lanes[position] * LANE,
            position * ROW + ROW // 2,
            None if parent is None else parent + 1,
            reason_of(call.rule),
        )
        for position, (call, parent) in enumerate(zip(calls, parents, strict=True))
    ]
    start = 0 if page_size is None else positions.get(chosen or "", 0) // page_size * page_size
    drawn = rows[start : None if page_size is None else start + page_size]
    end = start + len(drawn)
    lines = [
        TreeLine(row.call.edge, _path(rows[parent], row))
        for row, parent in zip(drawn, parents[start:end], strict=True)
        if parent is not None
    ]
    return CallTree(
        call_count=len(calls),
        rows=drawn,
        lines=lines,
        width=2 * _MARGIN + LANE * max(lanes[start:end], default=0),
        top=start * ROW,
        height=ROW * len(drawn),
        earlier=calls[start - 1].call_id if start else None,
        later=calls[end].call_id if end < len(calls) else None,
    )


def _parent(positions: Mapping[str, int], call: CallSummary) -> int | None:
    """Return the position of a call's parent. None if the call has no parent here, or if the parent did not start
    before the call (clocks may differ)."""
    parent = positions.get(call.parent_call_id or "")
    return parent if parent is not None and parent < positions[call.call_id] else None


def _lanes(calls: Sequence[CallSummary], parents: Sequence[int | None]) -> list[int]:
    """Return the lane of each call."""
    branches: list[Branch] = []
    branch_of: list[Branch] = []
    for position, (call, parent) in enumerate(zip(calls, parents, strict=True)):
        origin = None if parent is None else branch_of[parent]
        if origin is not None and call.edge in _STAYS and origin.newest == parent:
            branch = origin
        else:
            branch = Branch(position, position, position)
            branches.append(branch)
        branch.newest = branch.last_use = position
        if origin is not None:
            origin.last_use = position
        branch_of.append(branch)
    last_uses: list[int] = []
    """By lane: `Branch.last_use` of the newest branch in the lane."""
    for branch in branches:
        branch.lane = next((lane for lane, used in enumerate(last_uses) if used < branch.first), len(last_uses))
        if branch.lane == len(last_uses):
            last_uses.append(0)
        last_uses[branch.lane] = branch.last_use
    return [branch.lane for branch in branch_of]


def _path(parent: TreeRow, row: TreeRow) -> str:
    if parent.x == row.x:
        return f"M{parent.x} {parent.y}V{row.y}"
    # Down in the parent's lane, then over to the call's lane within the last row.
    turn = row.y - ROW
    return f"M{parent.x} {parent.y}V{turn}C{parent.x} {turn + ROW * 2 // 3} {row.x} {turn + ROW // 3} {row.x} {row.y}"
