"""Routes of groups and rollouts, of their trajectories, rewards and remarks, and of new sessions for users' own
agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import Path, Query, Request

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiStore, StreamedResponse, make_routers, not_found, require
from polar_proxy.errors import UsageError
from polar_proxy.export.exporter import rollout_lines
from polar_proxy.records import convert, convert_all, find_group, find_rollout, rollouts_of_group
from polar_proxy.rollout_spec import SessionBudget, whole_distribution
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import RolloutRow, Store
from polar_proxy.traces.builders import BUILDERS
from polar_proxy.types import Json

_FORMAT = "tokens-jsonl"
_ROWS: dict[int | str, Json] = {
    200: {
        "content": {m.NDJSON: {}},
        "description": "One JSON object per line, as `polar export --format tokens-jsonl` writes them.",
    }
}

GroupId = Annotated[str, Path(description="The id of a group.")]
RolloutId = Annotated[str, Path(description="The id of a rollout.")]
BuilderName = Annotated[str, Query(description="The builder of the traces: merged, per_call, tree or rescored.")]
AllGrades = Annotated[bool, Query(description="Also return traces of the grades `approximate` and `rejected`.")]

routers = make_routers()
admin, trainer = routers.admin, routers.trainer


@trainer.get("/groups/{group_id}", tags=["groups"])
async def get_group(store: ApiStore, group_id: GroupId) -> m.GroupDetail:
    """Return a group with all its rollouts. Rollouts without traces are included, because the baseline counts their
    rewards."""
    return await require("group", group_id, find_group(store, group_id))


@trainer.get("/groups/{group_id}/trajectories", tags=["groups"], response_class=StreamedResponse, responses=_ROWS)
async def group_trajectories(
    store: ApiStore, group_id: GroupId, builder: BuilderName = "merged", all_grades: AllGrades = False
) -> StreamedResponse:
    """Return one row for each trace of the group's ended rollouts, rollout by rollout."""
    _check_builder(builder)
    await require("group", group_id, store.groups.get(group_id))
    rows = await rollouts_of_group(store, group_id)
    return StreamedResponse(_lines(store, rows, builder, all_grades), media_type=m.NDJSON)


@trainer.get("/rollouts", tags=["rollouts"])
async def list_rollouts(
    store: ApiStore,
    where: Annotated[str | None, Query(description="Conditions such as `reward>=1, harness=codex`.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of rollouts to return.")] = 100,
    before: Annotated[str | None, Query(description="Only rollouts submitted before the rollout with this id.")] = None,
) -> m.RolloutList:
    """Return the newest `limit` rollouts that match the conditions, sorted from old to new."""
    rows = await store.rollouts.find(where=where, limit=limit, before=before)
    matched = rows or where is None or (before and await store.rollouts.find(where=where, limit=1))
    note = None if matched else await store.rollouts.explain_no_match(str(where))
    return m.RolloutList(rollouts=convert_all(m.Rollout, rows), note=note)


@trainer.get("/rollouts/{rollout_id}", tags=["rollouts"])
async def get_rollout(store: ApiStore, rollout_id: RolloutId) -> m.RolloutDetail:
    """Return a rollout with the stages of its attempts, its rewards and its remarks."""
    return await require("rollout", rollout_id, find_rollout(store, rollout_id))


@trainer.get("/rollouts/{rollout_id}/trajectory", tags=["rollouts"], response_class=StreamedResponse, responses=_ROWS)
async def rollout_trajectory(
    store: ApiStore, rollout_id: RolloutId, builder: BuilderName = "merged", all_grades: AllGrades = False
) -> StreamedResponse:
    """Return one row for each trace of an ended rollout."""
    _check_builder(builder)
    row = await require("rollout", rollout_id, store.rollouts.get(rollout_id))
    return StreamedResponse(_lines(store, [row], builder, all_grades), media_type=m.NDJSON)


@trainer.post("/rewards", status_code=201, tags=["rewards"])
async def add_reward(store: ApiStore, body: m.RewardRequest) -> m.Reward:
    """Add a reward to a rollout or session, or to a single call or trace of a rollout or session.

    Earlier rewards are kept. The newest reward for the rollout or session as a whole is shown in its field `reward`.
    If `session_id` names the session of a rollout, the request is refused: name the rollout instead.
    """
    sessions = await _sessions_of(store, body)
    await _check_parts(store, body, sessions)
    reward_id = await store.rewards.add(
        body.rollout_id,
        body.value,
        body.source,
        body.detail,
        trace_id=body.trace_id,
        call_id=body.call_id,
        session_id=body.session_id,
    )
    return convert(m.Reward, await require("reward", reward_id, store.rewards.get(reward_id)))


@trainer.post("/remarks", status_code=201, tags=["rewards"])
async def add_remark(store: ApiStore, body: m.RemarkRequest, request: Request) -> m.Remark:
    """Give a label, a note or a rating to a rollout or a session. Earlier remarks are kept.

    The author of a remark is the API key of the request. The newest label and rating are fields of the rollout or
    session, so that conditions such as `label=odd, rating>=4` select by them. If `session_id` names the session of a
    rollout, the request is refused: name the rollout instead.
    """
    await _sessions_of(store, body)
    remark_id = await store.remarks.add(
        body.kind,
        request.state.author,
        rollout_id=body.rollout_id,
        session_id=body.session_id,
        text=body.text,
        rating=body.value,
    )
    return convert(m.Remark, await require("remark", remark_id, store.remarks.get(remark_id)))


@admin.post("/sessions", status_code=201, tags=["sessions"])
async def new_session(store: ApiStore, body: m.SessionRequest) -> m.CreatedSession:
    """Create a session and its key, for an agent that you start yourself. The key is shown once."""
    key = new_key()
    policy = body.model_dump(exclude={"label", *SessionBudget.model_fields}, exclude_none=True) | body.as_policy()
    if body.temperature is not None:
        policy |= whole_distribution(body.temperature)
    session = await store.sessions.create(key_hash=hash_key(key), label=body.label, policy=policy or None, origin="key")
    return m.CreatedSession(session_id=session.session_id, key=key)


def _check_builder(builder: str) -> None:
    known = (*BUILDERS, "rescored")
    if builder not in known:
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join(known)}.")


async def _lines(store: Store, rows: Sequence[RolloutRow], builder: str, all_grades: bool) -> AsyncIterator[bytes]:
    for row in rows:
        for line in await rollout_lines(store, row, _FORMAT, builder=builder, all_grades=all_grades):
            yield line


async def _sessions_of(store: Store, body: m.FeedbackRequest) -> list[str]:
    """Return the ids of the sessions to which a request refers: all sessions of the named rollout, or the named
    session.

    Raises ApiError 404 if the rollout or session does not exist, and UsageError if the session belongs to a rollout.
    """
    if body.rollout_id is not None:
        await require("rollout", body.rollout_id, store.rollouts.get(body.rollout_id))
        return await store.sessions.ids_of_rollout(body.rollout_id)
    session_id = str(body.session_id)
    row = await require("session", session_id, store.sessions.get(session_id))
    if row.rollout_id is not None:
        raise UsageError(f"The session {session_id} belongs to a rollout: name {row.rollout_id} instead.")
    return [session_id]


async def _check_parts(store: Store, body: m.RewardRequest, sessions: Sequence[str]) -> None:
    """Raise ApiError 404 if the call or trace of a reward does not belong to one of these sessions."""
    kind = "rollout" if body.rollout_id is not None else "session"
    if body.call_id is not None:
        call = await store.calls.get(body.call_id)
        if call is None or call.session_id not in sessions:
            raise not_found(f"call of this {kind}", body.call_id)
    if body.trace_id is not None and not await store.traces.belongs_to(sessions, body.trace_id):
        raise not_found(f"trace of this {kind}", body.trace_id)
