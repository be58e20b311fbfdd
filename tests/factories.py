"""Factories for tests: engine infos, answers, calls, traces, and rows of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from polar_proxy.sequences import assemble, samplings_of
from polar_proxy.store import Store
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from polar_proxy.tasks import Task, task_to_json
from polar_proxy.types import CallRecord, Choice, EngineInfo, Message, Span, Trace, new_id

TASK = Task(task_id="task-1", family="swe-task", seed=11, instruction="Fix the bug.")
"""The task of the rollouts in a store."""
END = 7
"""The end-of-turn token of `INFO`."""


def engine_info(**changes: Any) -> EngineInfo:
    return replace(INFO, **changes)


INFO = EngineInfo(
    engine="vllm",
    version="0.27.0",
    model="polar-tiny",
    context_length=65536,
    template_hash="abc",
    logprob_mode="raw",
    capabilities=frozenset({"token_ids", "logprobs", "tools"}),
    eos_token_ids=(END,),
)


# ---------------------------------------------------------------- answers and calls


def token_ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def answer(tokens: Sequence[int], index: int = 0, logprobs: Sequence[float] | None = None) -> Choice:
    """Return an answer whose log-probabilities depend on token and position unless they are given."""
    values = [-(token + 1) / 64 - position / 1024 for position, token in enumerate(tokens)]
    return Choice(
        index=index,
        message=Message("assistant", " ".join(map(str, tokens))),
        finish_reason="stop",
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(values if logprobs is None else logprobs, dtype=np.float32),
    )


def random_answer(index: int = 0, tokens: int = 5, seed: int = 0) -> Choice:
    """Return an answer of `tokens` random tokens, with a text that is hard to store."""
    rng = np.random.default_rng(seed)
    return Choice(
        index=index,
        message=Message("assistant", "Grüße\u2028, 世界 \\ud83d"),
        finish_reason="stop",
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        logprobs=(-rng.exponential(1, tokens)).astype(np.float32),
    )


_CALL = CallRecord(
    call_id="",
    session_id="",
    dialect="openai_chat",
    path="/v1/chat/completions",
    stream=True,
    model="polar-tiny",
    engine=INFO,
    weight_version="3",
    logprob_mode="raw",
    status="ok",
    http_status=200,
    error=None,
    edge="root",
    parent_call_id=None,
    messages=(b'{"role":"system", "content":"be  exact"}', b'{"role":"user","content":"fix it"}'),
    tools=b'[{"type": "function"}]',
    params={"model": "polar-tiny", "temperature": 0.7, "nested": {"a": [1, None, True, 1.5]}},
    sampling={"temperature": 1.0, "max_tokens": 4096},
    prompt_ids=token_ids(1, 2, 3, END, 4, 5, 150_000),
    choices=(random_answer(),),
    started_at=1_700_000_000.125,
    first_token_at=1_700_000_000.375,
    ended_at=1_700_000_001.987654,
    cached_tokens=3,
)


def call_record(session_id: str, **changes: Any) -> CallRecord:
    """Return an answered call with every field set, as the gateway records it."""
    return replace(_CALL, **{"call_id": new_id("call"), "session_id": session_id, **changes})


def call(name: str, at: float, prompt: Sequence[int] | None, *answers: Sequence[int], **changes: Any) -> CallRecord:
    """Return a call with these tokens: `call("a", 0.0, [1, 2], [3, 4])` has one answer and started at that time."""
    plain: dict[str, Any] = {
        "call_id": name,
        "stream": False,
        "model": "m",
        "engine": None,
        "weight_version": None,
        "logprob_mode": "processed",
        "messages": (),
        "tools": None,
        "params": {},
        "sampling": {"temperature": 1.0},
        "prompt_ids": None if prompt is None else np.array(prompt, dtype=np.int32),
        "choices": tuple(answer(tokens, index) for index, tokens in enumerate(answers)),
        "started_at": at,
        "first_token_at": None,
        "ended_at": 0.0,
        "cached_tokens": None,
    }
    return call_record("sess_1", **{**plain, **changes})


# ---------------------------------------------------------------- rows of a store


async def new_session(store: Store, **changes: Any) -> str:
    row = await store.sessions.create(**{"key_hash": None, "label": None, "origin": "key", **changes})
    return row.session_id


ROLLOUT = NewRollout("mini-swe-agent", "process", "local", "polar-tiny", 11, {"timeout": 60})


async def new_rollout(store: Store, session_id: str | None = None, **changes: Any) -> str:
    """Queue a rollout that this process owns; with a session, claim it and start preparing it."""
    await store.tasks.put("task-1", "swe-task", 11, TASK.instruction, task_to_json(TASK))
    group = NewGroup("task-1", 1, {"temperature": 1.0}, (replace(ROLLOUT, **changes),))
    job, _ = await store.jobs.submit({}, [group], owned=True)
    (rollout,) = await store.rollouts.find(job_id=job.job_id)
    if session_id is not None:
        (claim,) = await store.queue.claim("elsewhere:1:worker", 1, 60, job_id=job.job_id)
        await store.rollouts.enter_stage(claim, "preparing", session_id=session_id)
    return rollout.rollout_id


def joined_trace(calls: list[CallRecord], builder: str = "merged", rollout_id: str | None = None) -> Trace:
    """Join the calls: the first prompt and answer, then what each later prompt adds, and its answer."""
    spans: list[Span] = []
    length = 0
    for call in calls:
        assert call.prompt_ids is not None
        spans.append(Span("context", call.call_id, length, call.prompt_ids.size))
        spans.append(Span("sampled", call.call_id, 0, call.choices[0].token_ids.size))
        length = call.prompt_ids.size + call.choices[0].token_ids.size
    token_ids, loss_mask, logprobs = assemble(spans, {call.call_id: call for call in calls})
    prompt = calls[0].prompt_ids
    assert prompt is not None
    return Trace(
        trace_id=new_id("trc"),
        session_id=calls[0].session_id,
        rollout_id=rollout_id,
        builder=builder,
        index=0,
        prompt_length=int(prompt.size),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        spans=tuple(spans),
        call_ids=tuple(call.call_id for call in calls),
        reward=None,
        grade="exact",
        sampling=samplings_of(spans, {call.call_id: call for call in calls}),
    )


def assert_same(found: Any, expected: Any) -> None:
    """Assert that both are equal in every field, and arrays in dtype, shape and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, tuple | list) and not all(isinstance(v, str | int) for v in expected):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, CallRecord | Choice | Trace):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected
