"""Sessions, calls, rollouts, groups, jobs and keys as the API and the reading commands show them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import orjson
from pydantic import BaseModel

from polar_proxy import api_models as m
from polar_proxy.errors import UsageError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.types import CallRecord, Message

if TYPE_CHECKING:
    from polar_proxy.config import EngineSettings
    from polar_proxy.engines.base import Engine

M = TypeVar("M", bound=BaseModel)

_COMMAND_LENGTH = 120
_CALL_FIELDS = (
    *("call_id", "session_id", "dialect", "path", "stream", "model", "weight_version", "logprob_mode"),
    *("status", "http_status", "error", "edge", "parent_call_id", "params", "sampling"),
    *("engine_name", "route", "hooks", "price_usd"),
    *("started_at", "first_token_at", "ended_at", "cached_tokens"),
)


def convert(model: type[M], row: object, **more: object) -> M:
    """Return an instance of the model, with the values of the row's fields of the same names and of `more`."""
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


async def find_record(
    store: Store, name: str, *, tokens_from: EngineSettings | None = None, engine: Engine | None = None
) -> m.Record:
    """Return the rollout, session or call that `name` refers to (see `store.names`). Raises UsageError.

    With `tokens_from`, the tokens of a call are decoded too: by `engine` if it serves the call's model, otherwise with
    the model's files or by the engine of these settings.
    """
    found = await store.names.find(name)
    if found.kind == "rollout" and (rollout := await _rollout(store, found.record_id)) is not None:
        return m.Record(rollout=rollout)
    if found.kind == "session" and (session := await _session(store, found.record_id)) is not None:
        return m.Record(session=session)
    if found.kind == "call" and (call := await store.calls.get(found.record_id)) is not None:
        return m.Record(call=await _call(call, tokens_from, engine))
    raise UsageError(f"The {found.kind} {found.record_id} was removed while it was read.")


async def _rollout(store: Store, rollout_id: str) -> m.RolloutRecord | None:
    row = await store.rollouts.get(rollout_id)
    if row is None:
        return None
    task = await store.tasks.get(row.task_id)
    return convert(
        m.RolloutRecord,
        row,
        instruction=task.instruction if task else None,
        stages=convert_all(m.Stage, await store.rollouts.stages(rollout_id)),
        rewards=convert_all(m.Reward, await store.rewards.of_rollout(rollout_id)),
        events=convert_all(m.RolloutEvent, await store.rollouts.events(rollout_id)),
        artifacts=[
            convert(m.Artifact, item, path=str(item.path)) for item in await store.artifacts.of_rollout(rollout_id)
        ],
        session=await _session(store, row.session_id) if row.session_id else None,
    )


async def _session(store: Store, session_id: str) -> m.SessionDetail | None:
    from polar_proxy.traces.grades import off_distribution_note

    summary = await store.sessions.summary(session_id)
    if summary is None:
        return None
    calls = await store.calls.of_session(session_id)
    answers = {call.call_id: last_command(call.choices[0].message) if call.choices else "" for call in calls}
    rows = await store.calls.summaries(session_id)
    return convert(
        m.SessionDetail,
        summary,
        calls=[convert(m.SessionCall, row, said=answers.get(row.call_id, "")) for row in rows],
        note=next(filter(None, map(off_distribution_note, calls)), None),
        traces=[
            convert(
                m.SessionTrace,
                trace,
                tokens=len(trace.token_ids),
                trained_tokens=int(trace.loss_mask.sum()),
                calls=list(trace.call_ids),
            )
            for trace in await store.traces.find(session_id=session_id)
        ],
        excluded=dict(await store.traces.exclusions(session_id)),
        rewards=convert_all(m.Reward, await store.rewards.of_session(session_id)),
    )


async def _call(call: CallRecord, tokens_from: EngineSettings | None, engine: Engine | None) -> m.CallDetail:
    from polar_proxy.engines.token_texts import NoTextsError, token_texts

    texts: list[list[str]] | None = None
    problem = None
    if tokens_from is not None and call.usage is not None:
        texts = await asyncio.to_thread(_split_answers, call)
        problem = None if texts else "The encoding of this model is not known here."
    elif tokens_from is not None:
        try:
            texts = await token_texts([choice.token_ids for choice in call.choices], call.engine, tokens_from, engine)
        except NoTextsError as error:
            problem = str(error)
    return await asyncio.to_thread(_call_detail, call, texts, problem)


def _split_answers(call: CallRecord) -> list[list[str]] | None:
    """Return the answers of a hosted call split as tiktoken encodes them; None if it does not know the model."""
    from polar_proxy.engines.hosted.token_counts import TokenCounter

    counter, model = TokenCounter(), (call.usage.model if call.usage else None) or call.model
    found = [counter.split(model, str(choice.message.content or "")) for choice in call.choices]
    split = [texts for texts in found if texts is not None]
    return split if len(split) == len(found) else None


def _call_detail(call: CallRecord, texts: list[list[str]] | None, problem: str | None) -> m.CallDetail:
    """Return all data of a call.

    `messages` and `tools` are in the dialect's own form, as the agent sent them; `conversation` has both in OpenAI's.
    """
    from polar_proxy.export import conversation

    engine = call.engine
    return m.CallDetail(
        **{name: getattr(call, name) for name in _CALL_FIELDS},
        engine=None if engine is None else {**asdict(engine), "capabilities": sorted(engine.capabilities)},
        usage=None if call.usage is None else m.CallUsage(**asdict(call.usage)),
        messages=[orjson.loads(message) for message in call.messages],
        tools=None if call.tools is None else orjson.loads(call.tools),
        conversation=conversation(call),
        prompt_ids=None if call.prompt_ids is None else call.prompt_ids.tolist(),
        choices=[
            m.CallChoice(
                index=choice.index,
                message=choice.message.to_openai(),
                finish_reason=choice.finish_reason,
                token_ids=choice.token_ids.tolist(),
                logprobs=[None if math.isnan(value) else value for value in choice.logprobs.tolist()],
                token_texts=None if texts is None else texts[position],
            )
            for position, choice in enumerate(call.choices)
        ],
        texts_problem=problem,
    )


def last_command(message: Message) -> str:
    """Return the command of an answer's last tool call, or the answer's text if it has none, in one line."""
    if message.tool_calls:
        arguments = message.tool_calls[-1].arguments
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            value = arguments
        if isinstance(value, dict):
            value = value.get("command") or value.get("cmd") or arguments
        return " ".join(str(value).split())[:_COMMAND_LENGTH]
    return " ".join(str(message.content or "").split())[:_COMMAND_LENGTH]
