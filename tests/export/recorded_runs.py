"""Rollouts and sessions in a store, as a real run leaves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from polar_proxy.store import RolloutStatus, Store
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from polar_proxy.tasks import task_to_json
from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.certificate import certify, stored_form
from polar_proxy.types import CallRecord, Json, new_id
from tests.factories import TASK, call

TOOLS: list[Json] = [{"type": "function", "function": {"name": "bash"}}]


def conversation(session_id: str, *, base: int = 10, off_distribution: bool = False) -> list[CallRecord]:
    """Return two turns that join, a drifted third, and a call whose client disconnected."""
    drift = [base, 1, base + 1, 99, 4]
    calls = [
        call("a", 0.0, [base, 1], [base + 1, 2]),
        call("b", 1.0, [base, 1, base + 1, 2, 3], [base + 2, 2, 7]),
        call(
            "c",
            2.0,
            drift,
            [5, 2],
            **({"logprob_mode": "raw", "sampling": {"temperature": 0.5}} if off_distribution else {}),
        ),
        call("d", 3.0, [*drift, 5, 2], [6], status="client_gone"),
    ]
    messages: list[bytes] = []
    made = []
    for record in calls:
        messages.append(orjson.dumps({"role": "user", "content": f"turn {len(messages)}"}))
        fields = {"messages": tuple(messages), "tools": orjson.dumps(TOOLS)}
        made.append(replace(record, call_id=new_id("call"), session_id=session_id, **fields))
        messages.append(orjson.dumps(record.choices[0].message.to_openai()))
    return made


async def session_without_rollout(store: Store, **changes: Any) -> tuple[str, list[CallRecord]]:
    """Record a session of `polar serve`, which belongs to no rollout."""
    row = await store.sessions.create(key_hash=None, label=None, origin="open")
    return row.session_id, await _commit(store, conversation(row.session_id, **changes))


async def rollout(
    store: Store,
    *,
    reward: float | None,
    built: bool = True,
    status: RolloutStatus = "done",
    samples: int = 1,
    **changes: Any,
) -> tuple[str, list[CallRecord]]:
    """Record a rollout with its session, its traces (unless it still runs) and its reward.

    The other rollouts of its group of `samples` stay queued.
    """
    await store.tasks.put("task-1", "swe-task", 11, TASK.instruction, task_to_json(TASK))
    new = NewRollout("mini-swe-agent", "process", "scripted", "m", 11, {})
    job, _ = await store.jobs.submit({}, [NewGroup("task-1", samples, {}, (new,) * samples)], owned=True)
    (claim,) = await store.queue.claim("worker", 1, 60, job_id=job.job_id)
    rollout_id = claim.rollout_id
    row = await store.sessions.create(key_hash=None, label=None, rollout_id=rollout_id, origin="rollout")
    calls = await _commit(store, conversation(row.session_id, **changes))
    await store.rollouts.enter_stage(claim, "running", session_id=row.session_id)
    await store.rollouts.update(rollout_id, status=status)
    if reward is not None:
        await store.rewards.add(rollout_id, reward, "tests", {})
    for name in BUILDERS:
        if built:
            made = build(calls, name, rollout_id=rollout_id, reward=reward)
            certificates = {trace_id: stored_form(one) for trace_id, one in certify(calls, made).items()}
            await store.traces.put(made.traces, made.excluded, name, row.session_id, rollout_id, certificates)
    return rollout_id, calls


async def _commit(store: Store, calls: list[CallRecord]) -> list[CallRecord]:
    for record in calls:
        await store.calls.commit(record)
    return calls
