"""The tree of a session's calls as a drawing beside a list: one row per call, one lane per line of conversation.

A call that continues the newest call of its lane stays in it; every other call opens a lane, as branches do in the
graph of a version control system. A lane is used again once nothing refers to its calls any more.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    calls: int
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


def draw_tree(calls: Sequence[CallSummary], chosen: str | None = None, most: int | None = None) -> CallTree:
    """Draw the calls of a session, ordered by start: all, or the page of `most` calls that contains the call
    `chosen`."""
    place = {call.call_id: index for index, call in enumerate(calls)}
    parents = [_parent(place, index, call) for index, call in enumerate(calls)]
    lanes = _lanes(calls, parents)
    rows = [
        TreeRow(
            index + 1,
            call,
            _MARGIN + lanes[index] * LANE,
            index * ROW + ROW // 2,
            None if parent is None else parent + 1,
            reason_of(call.rule),
        )
        for index, (call, parent) in enumerate(zip(calls, parents, strict=True))
    ]
    start = 0 if most is None else place.get(chosen or "", 0) // most * most
    drawn = rows[start : None if most is None else start + most]
    end = start + len(drawn)
    lines = [
        TreeLine(row.call.edge, _path(rows[parent], row))
        for row, parent in zip(drawn, parents[start:end], strict=True)
        if parent is not None
    ]
    return CallTree(
        calls=len(calls),
        rows=drawn,
        lines=lines,
        width=2 * _MARGIN + LANE * max((lanes[index] for index in range(start, end)), default=0),
        top=start * ROW,
        height=ROW * len(drawn),
        earlier=calls[start - 1].call_id if start else None,
        later=calls[end].call_id if end < len(calls) else None,
    )


def _parent(place: dict[str, int], index: int, call: CallSummary) -> int | None:
    """Return the row of a call's parent. None if the call has no parent here, or if the parent did not start before the
    call (clocks may differ)."""
    parent = place.get(call.parent_call_id or "")
    return parent if parent is not None and parent < index else None


def _lanes(calls: Sequence[CallSummary], parents: Sequence[int | None]) -> list[int]:
    """Return the lane of each call."""
    branch_of: list[int] = []
    """For each call its branch: a chain of calls, each of which continues the one before."""
    tips: list[int] = []
    """For each branch its newest call."""
    first: list[int] = []
    last: list[int] = []
    for index, call in enumerate(calls):
        parent = parents[index]
        if parent is not None and call.edge in _STAYS and tips[branch_of[parent]] == parent:
            branch = branch_of[parent]
        else:
            branch = len(tips)
            tips.append(index)
            first.append(index)
            last.append(index)
        branch_of.append(branch)
        tips[branch] = last[branch] = index
        if parent is not None:
            last[branch_of[parent]] = max(last[branch_of[parent]], index)
    free_from: list[int] = []
    """For each lane the row from which it is free."""
    lane_of: list[int] = []
    for branch, start in enumerate(first):
        lane = next((lane for lane, row in enumerate(free_from) if row < start), len(free_from))
        if lane == len(free_from):
            free_from.append(0)
        free_from[lane] = last[branch]
        lane_of.append(lane)
    return [lane_of[branch] for branch in branch_of]


def _path(parent: TreeRow, row: TreeRow) -> str:
    if parent.x == row.x:
        return f"M{parent.x} {parent.y}V{row.y}"
    # Down in the parent's lane, then over to the call's lane within the last row.
    turn = row.y - ROW
    return f"M{parent.x} {parent.y}V{turn}C{parent.x} {turn + ROW * 2 // 3} {row.x} {turn + ROW // 3} {row.x} {row.y}"
