"""What the store hands out: frozen rows, one class per listing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from polar_proxy.types import CallRecord, CallStatus, Edge, Json

SessionOrigin = Literal["key", "open", "rollout"]
"""Made by `polar session new`; opened by an unknown key on loopback; made for a rollout."""

RolloutStatus = Literal[
    "queued", "preparing", "ready", "running", "scoring", "done", "failed", "cancelled", "timed_out"
]
ROLLOUT_STATUSES: frozenset[str] = frozenset(get_args(RolloutStatus))
FINAL_STATUSES: frozenset[str] = frozenset({"done", "failed", "cancelled", "timed_out"})

StoredCall = CallRecord
"""A call as it is read back is equal to what was committed, so it is the same type."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    policy: Json | None
    created_at: float
    closed_at: float | None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    session_id: str
    label: str | None
    origin: SessionOrigin
    rollout_id: str | None
    created_at: float
    closed_at: float | None
    calls: int
    failed_calls: int
    """Calls whose status is not `ok`."""
    prompt_tokens: int
    completion_tokens: int
    last_call_at: float | None


@dataclass(frozen=True, slots=True)
class CallSummary:
    """A call without messages and tokens. `prompt_tokens` is None where the engine gave no ids."""

    call_id: str
    session_id: str
    dialect: str
    path: str
    stream: bool
    model: str
    status: CallStatus
    http_status: int
    error: str | None
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    ambiguous: bool
    thread: str | None
    message_count: int
    choices: int
    finish_reason: str | None
    """Of the first choice."""
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None
    weight_version: str | None
    started_at: float
    first_token_at: float | None
    ended_at: float


@dataclass(frozen=True, slots=True)
class TaskRow:
    task_id: str
    family: str
    seed: int | None
    instruction: str
    spec: Json
    created_at: float


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout with its counts. `traces` and `trained_tokens` count one builder's traces (`merged` unless asked)."""

    rollout_id: str
    group_id: str
    task_id: str
    group_index: int
    session_id: str | None
    status: RolloutStatus
    incomplete: bool
    reward: float | None
    exit_code: int | None
    error: str | None
    harness: str
    sandbox: str
    engine: str
    model: str
    seed: int | None
    config: Json
    owner_host: str | None
    owner_pid: int | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    job_id: str | None
    attempt: int
    cause: str | None
    """Machine-readable: why it failed, or why it is tried again."""
    masked: bool
    """It counts in its group's baseline and is not trained on."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    traces: int
    trained_tokens: int

    @property
    def final(self) -> bool:
        return self.status in FINAL_STATUSES


@dataclass(frozen=True, slots=True)
class RewardRow:
    reward_id: str
    rollout_id: str
    trace_id: str | None
    call_id: str | None
    source: str
    value: float | None
    detail: Json
    created_at: float


@dataclass(frozen=True, slots=True)
class EventRow:
    event_id: int
    rollout_id: str
    at: float
    kind: str
    data: Json


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    artifact_id: str
    rollout_id: str
    name: str
    sha256: str
    bytes: int
    created_at: float
    path: Path
    """Where its content lies on this machine."""
