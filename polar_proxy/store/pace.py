"""How far ahead of its consumers the feed is filled: a group is begun when it can still be delivered in time.

Groups are delivered oldest first. At G groups a policy version, one that has A offered groups before it (waiting, or
begun and not finished) is delivered floor(A / G) versions from now, and no sooner. Where that is more than its own
bound on staleness, it is not begun yet. G is measured, from what was acknowledged; until that is known nothing waits.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.store import schema

_LEASES = 256
"""So many of the newest acknowledged leases tell the pace."""

_g = schema.groups.c
_l = schema.leases.c
_r = schema.rollouts.c
_begun = exists().where(_r.group_id == _g.group_id, or_(_r.status != "queued", _r.claimed_by.is_not(None)))
_bounded = (_g.delivery == "open", _g.max_staleness.is_not(None))


async def staleness_filter(connection: AsyncConnection) -> ColumnElement[bool] | None:
    """A condition on rollouts: their group was begun, has no bound, or can be delivered within it. None: all can."""
    query = select(_g.group_id, _g.max_staleness, _begun).where(*_bounded).order_by(_g.group_id)
    groups = (await connection.execute(query)).all()
    if not groups or (pace := await _groups_a_version(connection)) is None:
        return None
    before = select(func.count()).where(or_(_g.delivery == "waiting", and_(_g.delivery == "open", _begun)))
    ahead = int((await connection.execute(before)).scalar_one())
    may: list[str] = []
    for group_id, bound, begun in groups:
        if not begun and int(ahead / pace) <= bound:
            may.append(group_id)
            ahead += 1
    not_begun = select(_g.group_id).where(*_bounded, ~_begun)
    return or_(_r.group_id.not_in(not_begun), _r.group_id.in_(may))


async def _groups_a_version(connection: AsyncConnection) -> float | None:
    """Of the versions before the newest, of which not all may have been acknowledged yet."""
    query = select(_l.policy_version).where(_l.outcome == "acknowledged").order_by(_l.lease_id.desc()).limit(_LEASES)
    versions = [
        int(version)
        for version in (await connection.execute(query)).scalars()
        if version is not None and version.isdecimal()
    ]
    whole = [version for version in versions if version != max(versions)]
    return len(whole) / len(set(whole)) if whole else None
