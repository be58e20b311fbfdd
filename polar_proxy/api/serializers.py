"""API models of groups, with the rows of the store that belong to them."""

from __future__ import annotations

from polar_proxy import api_models as m
from polar_proxy.api.context import require
from polar_proxy.records import convert, convert_all
from polar_proxy.store import RolloutRow, Store


async def group_detail(store: Store, group_id: str) -> m.GroupDetail:
    """Return a group with its rollouts. Raises ApiError 404."""
    row = await require("group", group_id, store.groups.get(group_id))
    return convert(m.GroupDetail, row, rollouts=convert_all(m.Rollout, await group_rollouts(store, group_id)))


async def group_rollouts(store: Store, group_id: str) -> list[RolloutRow]:
    return sorted(await store.rollouts.find(group_id=group_id), key=lambda row: row.group_index)
