"""Routes of groups, rollouts, their training rows and rewards, and of sessions without a rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import Query
from fastapi.responses import StreamingResponse

from polar_proxy import api_models as m
from polar_proxy.api import serializers
from polar_proxy.api.context import ApiContext, Routers, not_found
from polar_proxy.errors import UsageError
from polar_proxy.export.exporter import rollout_lines
from polar_proxy.gateway import hash_key, new_key
from polar_proxy.store import RolloutRow, Store
from polar_proxy.traces import BUILDERS
from polar_proxy.types import Json

NDJSON = "application/x-ndjson"
_FORM = "tokens-jsonl"
_ROWS: dict[int | str, Json] = {
    200: {"content": {NDJSON: {}}, "description": "One JSON object a line, as `polar export --format tokens-jsonl`."}
}


def add(rooms: Routers, api: ApiContext) -> None:
    admin, trainer, store = rooms.admin, rooms.trainer, api.store

    @trainer.get("/groups/{group_id}", tags=["groups"])
    async def get_group(group_id: str) -> m.GroupDetail:
        """A group with all of its rollouts, those without traces included: they are in its baseline."""
        return await serializers.group_detail(store, group_id)

    @trainer.get("/groups/{group_id}/trajectories", tags=["groups"], response_class=StreamingResponse, responses=_ROWS)
    async def group_trajectories(group_id: str, builder: str = "merged", all_grades: bool = False) -> StreamingResponse:
        """One row a trace of each rollout that has ended, rollout by rollout. `all_grades`: also those that are not
        to be trained on."""
        _check(builder)
        if await store.groups.get(group_id) is None:
            raise not_found("group", group_id)
        rows = await serializers.group_rollouts(store, group_id)
        return StreamingResponse(_lines(store, rows, builder, all_grades), media_type=NDJSON)

    @trainer.get("/rollouts", tags=["rollouts"])
    async def list_rollouts(
        where: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: str | None = None,
    ) -> m.RolloutList:
        """The newest that fulfil a condition such as `reward>=1, harness=codex`, oldest first."""
        rows = await store.rollouts.find(where=where, limit=limit, before=before)
        return m.RolloutList(rollouts=[serializers.rollout(row) for row in rows])

    @trainer.get("/rollouts/{rollout_id}", tags=["rollouts"])
    async def get_rollout(rollout_id: str) -> m.RolloutDetail:
        """A rollout with the stages of its attempts and its rewards."""
        return await serializers.rollout_detail(store, rollout_id)

    @trainer.get(
        "/rollouts/{rollout_id}/trajectory", tags=["rollouts"], response_class=StreamingResponse, responses=_ROWS
    )
    async def rollout_trajectory(
        rollout_id: str, builder: str = "merged", all_grades: bool = False
    ) -> StreamingResponse:
        """As `/groups/{group_id}/trajectories`, of one rollout."""
        _check(builder)
        row = await store.rollouts.get(rollout_id)
        if row is None:
            raise not_found("rollout", rollout_id)
        return StreamingResponse(_lines(store, [row], builder, all_grades), media_type=NDJSON)

    @trainer.post("/rewards", status_code=201, tags=["rewards"])
    async def add_reward(body: m.RewardRequest) -> m.Reward:
        """Give a reward to a rollout, or to one call or trace of it. Earlier ones stay; the newest of the rollout
        itself is its reward."""
        await _check_target(store, body)
        reward_id = await store.rewards.add(
            body.rollout_id, body.value, body.source, body.detail, trace_id=body.trace_id, call_id=body.call_id
        )
        (row,) = [row for row in await store.rewards.of_rollout(body.rollout_id) if row.reward_id == reward_id]
        return serializers.reward(row)

    @admin.post("/sessions", status_code=201, tags=["sessions"])
    async def new_session(body: m.SessionRequest) -> m.CreatedSession:
        """A session and its key, for an agent that no rollout starts. The key is told once."""
        key = new_key()
        names = ("temperature", "max_tokens", "prompt_mode", "past_reasoning")
        policy = {name: value for name in names if (value := getattr(body, name)) is not None}
        made = await store.sessions.create(
            key_hash=hash_key(key), label=body.label, policy=policy or None, origin="key"
        )
        return m.CreatedSession(session_id=made.session_id, key=key)


def _check(builder: str) -> None:
    known = (*BUILDERS, "rescored")
    if builder not in known:
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join(known)}.")


async def _lines(store: Store, rows: Sequence[RolloutRow], builder: str, all_grades: bool) -> AsyncIterator[bytes]:
    for row in rows:
        for line in await rollout_lines(store, row, _FORM, builder=builder, all_grades=all_grades):
            yield line


async def _check_target(store: Store, body: m.RewardRequest) -> None:
    if await store.rollouts.get(body.rollout_id) is None:
        raise not_found("rollout", body.rollout_id)
    if body.call_id is not None:
        for session_id in await store.sessions.ids_of_rollout(body.rollout_id):
            if body.call_id in {row.call_id for row in await store.calls.summaries(session_id)}:
                return
        raise not_found("call of this rollout", body.call_id)
    if body.trace_id is not None and not await store.traces.belongs_to(body.rollout_id, body.trace_id):
        raise not_found("trace of this rollout", body.trace_id)
