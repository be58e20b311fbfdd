"""Sessions, calls, rollouts, groups, jobs and keys as the API and the reading commands show them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import orjson
from pydantic import BaseModel

from polar_proxy import __version__
from polar_proxy import api_models as m
from polar_proxy.errors import UsageError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.types import CallRecord, EngineInfo

if TYPE_CHECKING:
    from polar_proxy.config import EngineSettings
    from polar_proxy.engines.base import Engine

M = TypeVar("M", bound=BaseModel)

_RATE_SECONDS = 60.0
_ACTIVE_SECONDS = 300.0
"""Time in seconds after its last call for which a session counts as active."""


def convert(model: type[M], row: object, **more: object) -> M:
    """Return an instance of the model. The value of each field is taken from `more` or, if it is not there, from the
    row's attribute of the same name."""
    shared = {name: getattr(row, name) for name in model.model_fields if name not in more and hasattr(row, name)}
    return model.model_validate({**shared, **more})


def convert_all(model: type[M], rows: Iterable[object]) -> list[M]:
    return [convert(model, row) for row in rows]


async def list_sessions(store: Store, *, limit: int, before: str | None = None) -> m.SessionList:
    """Return a page of sessions, newest first."""
    rows = await store.sessions.recent(limit=limit, before=before)
    return m.SessionList(sessions=convert_all(m.Session, rows))


async def list_jobs(
    store: Store, *, states: Collection[str] | None = None, limit: int, before: str | None = None
) -> m.JobList:
    """Return a page of jobs, newest first."""
    rows = await store.jobs.find(statuses=states, limit=limit, before=before)
    return m.JobList(jobs=convert_all(m.Job, rows), feed=await store.feed.depth())


async def find_job(store: Store, job_id: str) -> m.JobDetail | None:
    """Return a job with its groups; None if there is no such job."""
    row = await store.jobs.get(job_id)
    if row is None:
        return None
    return convert(m.JobDetail, row, group_list=convert_all(m.Group, await store.groups.of_job(job_id)))


async def rollouts_of_job(store: Store, job_id: str) -> m.RolloutList | None:
    """Return the rollouts of a job, in the order of submission; None if there is no such job."""
    if await store.jobs.get(job_id) is None:
        return None
    return m.RolloutList(rollouts=convert_all(m.Rollout, await store.rollouts.find(job_id=job_id)))


async def find_rollout(store: Store, rollout_id: str) -> m.RolloutDetail | None:
    """Return a rollout with its stages, rewards and remarks; None if there is no such rollout."""
    row = await store.rollouts.get(rollout_id)
    return None if row is None else convert(m.RolloutDetail, row, **await _details(store, row))


async def _details(store: Store, row: RolloutRow) -> dict[str, object]:
    """Return the fields that `RolloutDetail` adds to a rollout."""
    return {
        "repeat_of": await original_of(store, row),
        "stages": convert_all(m.Stage, await store.rollouts.stages(row.rollout_id)),
        "rewards": convert_all(m.Reward, await store.rewards.of_rollout(row.rollout_id)),
        "remarks": convert_all(m.Remark, await store.remarks.of_rollout(row.rollout_id)),
    }


async def original_of(store: Store, row: RolloutRow) -> str | None:
    """Return the id of the rollout that this one repeats; None if it repeats none."""
    spec = None if row.job_id is None else await store.jobs.spec(row.job_id)
    return None if spec is None else spec.get("repeat_of")


async def find_group(store: Store, group_id: str) -> m.GroupDetail | None:
    """Return a group with its rollouts; None if there is no such group."""
    row = await store.groups.get(group_id)
    if row is None:
        return None
    return convert(m.GroupDetail, row, rollouts=convert_all(m.Rollout, await rollouts_of_group(store, group_id)))


async def rollouts_of_group(store: Store, group_id: str) -> list[RolloutRow]:
    """Return the rows of a group's rollouts, in the order of the group."""
    return sorted(await store.rollouts.find(group_id=group_id), key=lambda row: row.group_index)


async def list_keys(store: Store) -> m.KeyList:
    """Return all keys of the HTTP API, including revoked ones."""
    return m.KeyList(keys=convert_all(m.ApiKey, await store.api_keys.all()))


async def list_training_runs(store: Store) -> m.TrainingRunList:
    """Return all training runs, newest first."""
    return m.TrainingRunList(runs=convert_all(m.TrainingRun, await store.training.runs()))


async def recent_activity(store: Store) -> m.Activity:
    """Return the rates of the last minute, the active sessions and the newest failures."""
    return m.Activity(
        rates=m.ActivityRates(**await store.activity.rates(_RATE_SECONDS)),
        rollouts=await store.activity.unfinished(),
        sessions=convert_all(m.ActiveSession, await store.activity.sessions(_ACTIVE_SECONDS)),
        failures=convert_all(m.Failure, await store.activity.failures()),
    )


async def database_service_state(store: Store) -> m.ServiceState:
    """Return the state of all servers of a database. Fields that describe a single server are null."""
    fleet = await store.fleet.get()
    return m.ServiceState(
        version=__version__,
        engine=None,
        policy_version=None,
        feed=await store.feed.depth(),
        fleet=m.FleetState(
            state="paused" if fleet.paused else "working",
            paused_until=fleet.paused_until if fleet.paused else None,
            in_flight=len(await store.fleet.in_flight()),
        ),
    )


async def find_record(
    store: Store, name: str, *, tokens_from: EngineSettings | None = None, engine: Engine | None = None
) -> m.Record:
    """Return the rollout, session or call that `name` refers to (see `store.names`).

    Raises UsageError if no record or several records have this name, or if the record is removed meanwhile. With
    `tokens_from`, each call also has its sampled tokens as texts. They are decoded by `engine` if it serves the call's
    model, otherwise with the model's files or by the engine that `tokens_from` describes.
    """
    found = await store.names.find(name)
    if found.kind == "rollout" and (rollout := await _rollout(store, found.record_id, tokens_from, engine)) is not None:
        return m.Record(rollout=rollout)
    if found.kind == "session" and (session := await _session(store, found.record_id, tokens_from, engine)) is not None:
        return m.Record(session=session)
    if found.kind == "call" and (call := await store.calls.get(found.record_id)) is not None:
        return m.Record(call=await _call(call, tokens_from, engine))
    raise UsageError(f"The {found.kind} {found.record_id} was removed while it was read.")


async def _rollout(
    store: Store, rollout_id: str, tokens_from: EngineSettings | None, engine: Engine | None
) -> m.RolloutRecord | None:
    row = await store.rollouts.get(rollout_id)
    if row is None:
        return None
    task = await store.tasks.get(row.task_id)
    return convert(
        m.RolloutRecord,
        row,
        **await _details(store, row),
        instruction=task.instruction if task else None,
        events=convert_all(m.RolloutEvent, await store.rollouts.events(rollout_id)),
        artifacts=[
            convert(m.Artifact, item, path=str(item.path)) for item in await store.artifacts.of_rollout(rollout_id)
        ],
        session=await _session(store, row.session_id, tokens_from, engine) if row.session_id else None,
    )


async def _session(
    store: Store, session_id: str, tokens_from: EngineSettings | None = None, engine: Engine | None = None
) -> m.SessionDetail | None:
    from polar_proxy.records.story import session_calls
    from polar_proxy.traces.grades import off_distribution_note

    summary = await store.sessions.summary(session_id)
    if summary is None:
        return None
    calls = await store.calls.of_session(session_id)
    rows = await store.calls.summaries(session_id)
    texts, problem = None, None
    if tokens_from is not None:
        texts, problem = await _texts_of_calls(calls, tokens_from, engine)
    return convert(
        m.SessionDetail,
        summary,
        calls=await asyncio.to_thread(session_calls, rows, calls, texts),
        texts_problem=problem,
        note=next(filter(None, map(off_distribution_note, calls)), None),
        traces=[
            convert(m.SessionTrace, trace, tokens=trace.length, calls=list(trace.call_ids))
            for trace in await store.traces.summaries(session_id)
            if trace.builder == "merged"
        ],
        excluded=dict(await store.traces.exclusions(session_id)),
        rewards=convert_all(m.Reward, await store.rewards.of_session(session_id)),
        remarks=convert_all(m.Remark, await store.remarks.of_session(session_id)),
    )


async def _texts_of_calls(
    calls: Sequence[CallRecord], settings: EngineSettings, engine: Engine | None
) -> tuple[dict[str, list[list[str]]], str | None]:
    """Return the token texts of the answers by call id, and the reason why some calls have no texts (None if all calls
    have texts)."""
    from polar_proxy.engines.token_texts import NoTextsError, token_texts

    groups: dict[EngineInfo | None, list[CallRecord]] = defaultdict(list)
    texts: dict[str, list[list[str]]] = {}
    problem = None
    for call in calls:
        if call.usage is None:
            groups[call.engine].append(call)
        elif (split := await asyncio.to_thread(_split_answers, call)) is not None:
            texts[call.call_id] = split
        else:
            problem = "The encoding of this model is not known here."
    for info, group in groups.items():
        try:
            found = await token_texts([one.token_ids for call in group for one in call.choices], info, settings, engine)
        except NoTextsError as error:
            problem = str(error)
            continue
        answers = iter(found)
        texts |= {call.call_id: [next(answers) for _ in call.choices] for call in group}
    return texts, problem


async def _call(call: CallRecord, tokens_from: EngineSettings | None, engine: Engine | None) -> m.CallDetail:
    texts, problem = ({}, None) if tokens_from is None else await _texts_of_calls([call], tokens_from, engine)
    return await asyncio.to_thread(_call_detail, call, texts.get(call.call_id), problem)


def _split_answers(call: CallRecord) -> list[list[str]] | None:
    """Return the token texts of each answer of a hosted call, by tiktoken; None if tiktoken does not know the model."""
    from polar_proxy.engines.hosted.token_counts import TokenCounter

    counter, model = TokenCounter(), (call.usage.model if call.usage else None) or call.model
    found = [counter.split(model, str(choice.message.content or "")) for choice in call.choices]
    split = [texts for texts in found if texts is not None]
    return split if len(split) == len(found) else None


def _call_detail(call: CallRecord, texts: list[list[str]] | None, problem: str | None) -> m.CallDetail:
    """Return all data of a call.

    `messages` and `tools` are in the format of the API that the agent called, exactly as the agent sent them.
    `conversation` has messages and tools in OpenAI's format.
    """
    from polar_proxy.export.conversations import conversation
    from polar_proxy.records.story import call_choices
    from polar_proxy.sessions.lineage_reasons import reason_of

    engine = call.engine
    return convert(
        m.CallDetail,
        call,
        reason=reason_of(call.rule),
        usage=None if call.usage is None else m.CallUsage(**asdict(call.usage)),
        engine=None if engine is None else {**asdict(engine), "capabilities": sorted(engine.capabilities)},
        messages=[orjson.loads(message) for message in call.messages],
        tools=None if call.tools is None else orjson.loads(call.tools),
        conversation=conversation(call),
        prompt_ids=None if call.prompt_ids is None else call.prompt_ids.tolist(),
        choices=call_choices(call.choices, texts),
        texts_problem=problem,
    )
