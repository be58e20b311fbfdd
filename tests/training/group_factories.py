"""Factories of finished groups: rollouts with rewards and traces with tokens, without a store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from polar_proxy.store import RolloutRow
from polar_proxy.training.batch import GroupRollout, TrainingBatch, TrainingGroup
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.losses import OWN_AGGREGATION
from polar_proxy.training.policy.packing import Microbatch, make_microbatches, pack_trees
from polar_proxy.types import AnswerSampling, Span, Trace


def rollout(
    index: int, reward: float | None, *, status: str = "done", incomplete: bool = False, masked: bool = False
) -> RolloutRow:
    return RolloutRow(
        rollout_id=f"roll_{index}",
        group_id="group_0",
        task_id="task",
        group_index=index,
        session_id=f"sess_{index}",
        status=status,  # type: ignore[arg-type]
        incomplete=incomplete,
        masked=masked,
        job_id=None,
        attempt=1,
        cause=None,
        reward=reward,
        label=None,
        rating=None,
        exit_code=0,
        error=None,
        harness="h",
        sandbox="process",
        engine="local",
        model="m",
        seed=0,
        config={},
        owner_host=None,
        owner_pid=None,
        created_at=0.0,
        started_at=0.0,
        ended_at=1.0,
        calls=1,
        prompt_tokens=1,
        completion_tokens=1,
        price_usd=None,
        traces=1,
        trained_tokens=1,
    )


def trace(
    name: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    grade: str = "exact",
    logprobs: Sequence[float] | None = None,
    parent: str | None = None,
    branch_at: int = 0,
    call: str | None = None,
    temperature: float = 1.0,
    version: str | None = None,
) -> Trace:
    """Return a trace of one call."""
    n, m = len(prompt), len(sampled)
    values = [-1.0] * m if logprobs is None else list(logprobs)
    call = call or f"call_{name}"
    return Trace(
        trace_id=name,
        session_id="s",
        rollout_id="r",
        builder="merged",
        index=0,
        prompt_length=n,
        token_ids=np.array([*prompt, *sampled], dtype=np.int32),
        loss_mask=np.array([0] * n + [1] * m, dtype=np.uint8),
        logprobs=np.array([np.nan] * n + values, dtype=np.float32),
        spans=(Span("context", call, 0, n), Span("sampled", call, 0, m)),
        call_ids=(call,),
        grade=grade,
        parent_trace_id=parent,
        branch_at=branch_at,
        sampling=(AnswerSampling(temperature, {}, "processed", ((0, version),)),),
    )


def group(*members: GroupRollout, name: str = "group_0") -> TrainingGroup:
    return TrainingGroup(name, "task", members)


def microbatch_of(batch: TrainingBatch, config: GrpoConfig) -> Microbatch:
    """Return a small batch as one microbatch on the CPU."""
    (microbatch,) = make_microbatches(
        pack_trees([one.token_ids for one in batch.sequences], 10_000),
        batch.sequences,
        aggregation=OWN_AGGREGATION.get(config.loss, config.loss_aggregation),
        max_rollout_tokens=config.max_rollout_tokens,
        with_observations=False,
        device=torch.device("cpu"),
    )
    return microbatch
