"""Recorded runs for the tests of the web page: all edges, hostile texts, long sequences, many rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from polar_proxy.engines.bundled import POLAR_TINY_NAME
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.store import Store
from polar_proxy.traces.operations import build_traces
from polar_proxy.types import CallRecord, Choice, Message, ToolCall
from tests.factories import call_record, engine_info, new_rollout, new_session
from tests.fakes.tiny_agent import HOSTILE

TINY = engine_info(engine="local", model=POLAR_TINY_NAME)
_START = 1_700_000_000.0


def message(role: str, content: str | None, **fields: Any) -> bytes:
    return orjson.dumps({"role": role, "content": content, **fields})


def tool_answer(text: str, tool: ToolCall | None, tokens: np.ndarray, seed: int) -> Choice:
    logprobs = -np.random.default_rng(seed).exponential(0.4, len(tokens)).astype(np.float32)
    calls = () if tool is None else (tool,)
    return Choice(0, Message("assistant", text, tool_calls=calls), "tool_calls" if tool else "stop", tokens, logprobs)


def text_ids(text: str) -> np.ndarray:
    from tokenizers import Tokenizer

    return np.array(Tokenizer.from_file(str(POLAR_TINY / "tokenizer.json")).encode(text).ids, np.int32)


async def commit(store: Store, *calls: CallRecord) -> None:
    await asyncio.gather(*(store.calls.commit(call) for call in calls))


async def running_rollout(store: Store, label: str, **changes: Any) -> tuple[str, str]:
    """Start a rollout. Return its id and that of its session."""
    rollout_id = await new_rollout(store, **changes)
    session_id = await new_session(store, label=label, rollout_id=rollout_id)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    (claim,) = await store.queue.claim("elsewhere:1:worker", 1, 60, job_id=row.job_id)
    await store.rollouts.enter_stage(claim, "preparing", session_id=session_id)
    return rollout_id, session_id


async def long_session(store: Store, *, turns: int, tokens: int, rollout: bool = True) -> str:
    """Record a conversation that grows by a tool call and its result in each turn. Return the session id.

    Its merged trace has about `turns * tokens` tokens.
    """
    label = "a long conversation"
    rollout_id, session_id = None, ""
    if rollout:
        rollout_id, session_id = await running_rollout(store, label, model=POLAR_TINY_NAME)
    else:
        session_id = await new_session(store, label=label)
    words = text_ids("The bug is in line 42.\n    return total / count  # not len(items) - 1\n")
    messages = [message("system", "You fix bugs."), message("user", "The mean of an empty list fails. Fix it.")]
    prompt = np.resize(words, tokens // 2)
    parent: CallRecord | None = None
    for turn in range(turns):
        tool = ToolCall(
            f"tool_{turn}", "bash", orjson.dumps({"command": f"sed -n {turn},{turn + 9}p mean.py"}).decode()
        )
        sampled = np.resize(words, tokens // 4)
        call = call_record(
            session_id,
            edge="root" if parent is None else "continues",
            rule=None if parent is None else "extends",
            parent_call_id=None if parent is None else parent.call_id,
            base_call_id=None if parent is None else parent.call_id,
            base_choice=None if parent is None else 0,
            prompt_mode="render" if parent is None else "continue",
            prompt_reason="no_base" if parent is None else None,
            engine=TINY,
            model=POLAR_TINY_NAME,
            weight_version=str(turn // 4),
            messages=tuple(messages),
            tools=orjson.dumps([{"type": "function", "function": {"name": "bash", "description": "Run a command."}}]),
            prompt_ids=prompt,
            choices=(tool_answer(f"I read part {turn} of the file.", tool, sampled, turn),),
            sampling={"temperature": 1.0},
            started_at=_START + turn * 4,
            first_token_at=_START + turn * 4 + 0.5,
            ended_at=_START + turn * 4 + 2.5,
        )
        await commit(store, call)
        called = [tool.to_openai()]
        messages += [
            message("assistant", f"I read part {turn} of the file.", tool_calls=called),
            message("tool", f"line {turn}: return total / count", tool_call_id=tool.id),
        ]
        prompt = np.concatenate([prompt, sampled, np.resize(words, tokens // 4)])
        parent = call
    await build_traces(store, session_id, rollout_id, reward=1.0, incomplete=False)
    return session_id


async def branching_session(store: Store) -> str:
    """Record a session with every edge."""
    session_id = await new_session(store, label="every edge")
    edges: list[tuple[str, int | None, str | None, bool]] = [
        ("root", None, None, False),
        ("side_call", 0, "opencode_title", False),
        ("continues", 0, "extends", False),
        ("continues", 2, "extends", False),
        ("retries", 3, "sdk_retry_header", False),
        ("subagent", 3, "prompt_from_tool_call", False),
        ("continues", 5, "extends", False),
        ("continues", 6, "extends", False),
        ("continues", 3, "by_call_ids", False),
        ("rewinds", 3, "answer_replaced", True),
        ("compacts", 9, "claude_compacted", False),
        ("continues", 10, "extends", False),
    ]
    calls: list[CallRecord] = []
    for number, (edge, parent, rule, ambiguous) in enumerate(edges):
        failed = edge == "retries"
        calls.append(
            call_record(
                session_id,
                edge=edge,
                rule=rule,
                ambiguous=ambiguous,
                parent_call_id=None if parent is None else calls[parent].call_id,
                engine=TINY,
                tools=None,
                status="upstream_error" if failed else "ok",
                http_status=502 if failed else 200,
                error="The engine closed the connection." if failed else None,
                choices=() if failed else call_record("s").choices,
                started_at=_START + number,
                first_token_at=None if failed else _START + number + 0.25,
                ended_at=_START + number + 0.8,
            )
        )
    await commit(store, *calls)
    return session_id


async def hostile_rollout(store: Store) -> tuple[str, str]:
    """Record a rollout with hostile text in every field that a client, an agent or a model sets.

    Return the ids of the rollout and of its call.
    """
    rollout_id, session_id = await running_rollout(store, HOSTILE, harness=HOSTILE, model=HOSTILE, engine=HOSTILE)
    tool = ToolCall(HOSTILE, HOSTILE, orjson.dumps({HOSTILE: HOSTILE}).decode())
    call = replace(
        call_record(session_id),
        path=f"/v1/{HOSTILE}",
        model=HOSTILE,
        error=HOSTILE,
        messages=(
            message("user", HOSTILE, name=HOSTILE),
            message("assistant", HOSTILE, tool_calls=[tool.to_openai()], reasoning_content=HOSTILE),
            message("tool", HOSTILE, tool_call_id=HOSTILE),
        ),
        tools=orjson.dumps([{"type": "function", "function": {"name": HOSTILE, "description": HOSTILE}}]),
        params={"model": HOSTILE, HOSTILE: HOSTILE},
        choices=(tool_answer(HOSTILE, tool, np.array([1, 2], np.int32), 0),),
    )
    await commit(store, call)
    diff = f"diff --git a/x b/{HOSTILE}\n--- a/x\n+++ b/x\n@@ -1 +1 @@ {HOSTILE}\n-{HOSTILE}\n+{HOSTILE}\n"
    for name, text in (("patch.diff", diff), ("tests.log", HOSTILE), ("agent.log", HOSTILE)):
        await store.artifacts.add(rollout_id, name, text.encode())
    await store.rewards.add(rollout_id, 0.5, HOSTILE, {"signs": [HOSTILE], "parts": [], HOSTILE: HOSTILE})
    await store.rollouts.update(rollout_id, error=HOSTILE)
    return rollout_id, call.call_id


async def many_rollouts(store: Store, number: int) -> None:
    """Queue a job of `number` rollouts in one group."""
    from polar_proxy.store.service.jobs import NewGroup
    from polar_proxy.tasks import task_to_json
    from tests.factories import ROLLOUT, TASK

    await store.tasks.put("task-1", "swe-task", 11, TASK.instruction, task_to_json(TASK))
    await store.jobs.submit({}, [NewGroup("task-1", number, {}, (ROLLOUT,) * number)], owned=True)


async def drifting_session(store: Store) -> str:
    """Record two calls of which the second has another token at position 3 than the first. Return the session id."""
    session_id = await new_session(store)
    first = call_record(session_id, prompt_ids=np.array([1, 2, 3], np.int32), engine=TINY)
    changed = np.concatenate([np.array([1, 2, 3, 99], np.int32), first.choices[0].token_ids])
    second = call_record(
        session_id,
        edge="continues",
        parent_call_id=first.call_id,
        base_call_id=first.call_id,
        base_choice=0,
        prompt_reason="engine_cannot_continue",
        prompt_ids=changed,
        engine=TINY,
        started_at=first.started_at + 9,
    )
    await commit(store, first, second)
    await build_traces(store, session_id, None, reward=None, incomplete=False)
    return session_id
