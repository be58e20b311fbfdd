"""Groups of finished rollouts that are made of recorded sessions, and training runs that trained them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from sqlalchemy import update

from polar_proxy.engines.bundled import POLAR_TINY_NAME
from polar_proxy.store import Store, schema
from polar_proxy.store.service.jobs import NewGroup
from polar_proxy.tasks import task_to_json
from polar_proxy.traces.operations import build_traces
from polar_proxy.training.config import GrpoConfig
from polar_proxy.types import Json, ToolCall
from tests.factories import ROLLOUT, TASK, call_record, new_session
from tests.view.recorded import TINY, commit, message, text_ids, tool_answer

PATCH = b"diff --git a/mean.py b/mean.py\n--- a/mean.py\n+++ b/mean.py\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n"


@dataclass(frozen=True)
class RecordedMember:
    """A rollout to make of a session without one."""

    harness: str
    session_id: str
    reward: float


@dataclass(frozen=True)
class RecordedGroup:
    group_id: str
    rollout_ids: list[str]

    @property
    def comparison(self) -> str:
        """The path of the page that compares the first two rollouts."""
        return "/view/compare?run={}&run={}".format(*self.rollout_ids)


async def finish_group(store: Store, members: Sequence[RecordedMember]) -> RecordedGroup:
    """Make finished rollouts of one group for training, each with traces, patch and reward."""
    await store.tasks.put("task-1", "swe-task", 11, TASK.instruction, task_to_json(TASK))
    rollouts = tuple(replace(ROLLOUT, harness=member.harness) for member in members)
    group = NewGroup("task-1", len(members), {"temperature": 1.0}, rollouts, for_training=True)
    job, _ = await store.jobs.submit({}, [group], owned=True)
    claims = await store.queue.claim("elsewhere:1:worker", len(members), 60, job_id=job.job_id)
    for claim, member in zip(claims, members, strict=True):
        await store.rollouts.enter_stage(claim, "preparing", session_id=member.session_id)
        owned = update(schema.sessions).where(schema.sessions.c.session_id == member.session_id)
        async with store.database.writing() as connection:
            await connection.execute(owned.values(rollout_id=claim.rollout_id))
        await build_traces(store, member.session_id, claim.rollout_id, reward=member.reward, incomplete=False)
        await store.artifacts.add(claim.rollout_id, "patch.diff", PATCH)
        parts = [{"kind": "tests", "weight": 1.0, "reward": member.reward}]
        await store.rewards.add(claim.rollout_id, member.reward, "hidden_tests", {"parts": parts})
        await store.rollouts.update(claim.rollout_id, status="done")
    rows = {row.rollout_id: row for row in await store.rollouts.find(job_id=job.job_id)}
    group_id = rows[claims[0].rollout_id].group_id
    await store.groups.settle(group_id)
    return RecordedGroup(group_id, [claim.rollout_id for claim in claims])


async def short_session(store: Store, text: str, seed: int) -> str:
    """Record a session of two calls whose first answer has this text. Return its id."""
    session_id = await new_session(store, label=text)
    prompt, sampled, result = (text_ids(one) for one in ("Fix the mean.\n", text, "1 return total / count\n"))
    messages = (message("system", "You fix bugs."), message("user", "Fix the mean."))
    tool = ToolCall(f"tool_{seed}", "bash", '{"command": "cat -n mean.py"}')
    common = {"engine": TINY, "model": POLAR_TINY_NAME, "tools": None, "sampling": {"temperature": 1.0}}
    first = call_record(
        session_id, messages=messages, prompt_ids=prompt, choices=(tool_answer(text, tool, sampled, seed),), **common
    )
    asked = message("assistant", text, tool_calls=[tool.to_openai()])
    second = call_record(
        session_id,
        edge="continues",
        rule="extends",
        parent_call_id=first.call_id,
        base_call_id=first.call_id,
        base_choice=0,
        messages=(*messages, asked, message("tool", "return total / count", tool_call_id=tool.id)),
        prompt_ids=np.concatenate([prompt, sampled, result]),
        choices=(tool_answer(f"Done: {text}", None, text_ids("Done.\n"), seed + 1),),
        started_at=first.ended_at + 1,
        first_token_at=first.ended_at + 1.5,
        ended_at=first.ended_at + 3,
        **common,
    )
    await commit(store, first, second)
    return session_id


async def short_group(store: Store) -> RecordedGroup:
    """Record a group of three rollouts that part in their first answer."""
    texts = ("I read mean.py first.", "I read the tests first.", "I give up.")
    sessions = [await short_session(store, text, 2 * number) for number, text in enumerate(texts)]
    rewards = (1.0, 0.5, 0.0)
    return await finish_group(
        store, [RecordedMember("tiny-agent", *pair) for pair in zip(sessions, rewards, strict=True)]
    )


async def train_group(store: Store, group_id: str, steps: int = 12) -> list[str]:
    """Record two training runs, the first of which leased and trained the group. Return their ids."""
    names = ("first", "second")
    await store.feed.lease(names[0], 1, 600, policy_version="0")
    for seed, name in enumerate(names):
        lines = [_step(number, seed, [group_id] if number == 1 else []) for number in range(1, steps + 1)]
        held_out = {"kind": "eval", "step": steps, "at": 1.0, "reward": 0.75}
        synced = [{"kind": "sync", "step": line["step"], "at": 1.0, "seconds": 0.3} for line in lines]
        await store.training.put_run(f"run_{name}", name, GrpoConfig().to_json(), [*lines, *synced, held_out])
    return [f"run_{name}" for name in names]


def _step(number: int, seed: int, groups: list[str]) -> Json:
    """Return a line of metrics.jsonl with every quantity that has a curve."""
    wave = math.sin(number / 2 + seed)
    values = {
        "reward": 0.5 + wave / 4,
        "loss": 0.1 * wave,
        "approx_kl": 0.01,
        "kl_reference": 0.02,
        "entropy": 0.5,
        "mismatch_mean": 1e-4,
        "mismatch_max": 1e-2,
        "staleness": number % 3,
        "engine_busy_seconds": 4.0,
        "step_seconds": 6.0,
        "waiting_seconds": 4.5,
        "training_seconds": 1.5,
        "dropped_stale": 0,
        "sampled_tokens": 900,
        "trained_tokens": 600,
        "computed_tokens": 800,
        "rollouts": 3,
        "trained_rollouts": 2,
    }
    skipped = {"no_spread": {"rollouts": 1, "traces": 1, "tokens": 300}}
    return {"kind": "step", "step": number, "at": float(number), "groups": groups, "skipped": skipped, **values}
