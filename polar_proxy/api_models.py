"""What goes over the wire of the HTTP API, each shape written once: the server reads and answers with these, and so
does the client.

Requests refuse fields that they do not know, so that a misspelt one is told. Answers let them pass: a client of today
reads the answers of a newer server. Times are seconds since the epoch, durations are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polar_proxy.rollout_spec import JobSpec

API_PREFIX = "/api/v1"
"""Where the routes begin."""

Role = Literal["admin", "trainer"]
ErrorCode = Literal[
    "bad_request",
    "unauthorised",
    "forbidden",
    "not_found",
    "conflict",
    "pause_timed_out",
    "drain_timed_out",
    "lease_lost",
    "invalid",
    "unavailable",
]
EventName = Literal["stage", "group", "job", "feed", "end"]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WaitSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ApiRequestModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# Requests


class JobRequest(JobSpec):
    """Queue rollouts of some tasks. A field that is not given, or null, is as in the server's settings, [run]."""

    task: str | None = None
    """A task family, a file or folder on the server's machine, or module:Class, as for `polar run`."""
    task_specs: list[dict[str, Any]] | None = None
    """The tasks themselves, each as in a line of a task file."""
    seed: int | None = Field(None, ge=0)
    """Only this instance of `task`; of a file: the task at this position."""
    instances: int | None = Field(None, ge=1)
    """The first N tasks. Default: one of a family, all of a file, a folder or `task_specs`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _one_source(self) -> JobRequest:
        if (self.task is None) == (self.task_specs is None):
            raise ValueError("give either task or task_specs")
        if self.seed is not None and self.instances is not None:
            raise ValueError("give seed (one instance) or instances (many), not both")
        if self.task_specs is not None and self.seed is not None:
            raise ValueError("seed chooses an instance of task, not of task_specs")
        return self


Scope = Literal["server", "all"]
"""The server that is asked, or all on its database."""


class PauseRequest(ApiRequestModel):
    """Begin nothing new."""

    seconds: PositiveSeconds | None = None
    """Resumed by itself after so long. None: until it is resumed."""
    wait_idle: WaitSeconds | None = None
    """Wait so long until nothing runs; where that does not suffice, nothing stays paused and the answer is 409."""


class ServicePauseRequest(PauseRequest):
    """Of no job, on one server or on all."""

    scope: Scope = "server"


class ServiceResumeRequest(ApiRequestModel):
    scope: Scope = "server"


class DrainRequest(ApiRequestModel):
    scope: Scope = "server"
    timeout: WaitSeconds | None = 600.0
    """How long to wait for what is in hand; None: for ever."""


class RewardRequest(ApiRequestModel):
    """A reward from outside: of a rollout, or of one call or one trace of it."""

    rollout_id: str
    value: float | None = Field(allow_inf_nan=False)
    """None: whoever judged could not say, which is not 0."""
    source: str = Field(min_length=1)
    """Who says so: `human:anna`, `ci`, ..."""
    call_id: str | None = None
    trace_id: str | None = None
    detail: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_target(self) -> RewardRequest:
        if self.call_id is not None and self.trace_id is not None:
            raise ValueError("give call_id or trace_id, not both")
        return self


class SessionRequest(ApiRequestModel):
    """A session for an agent that no rollout starts. What is given replaces what its requests ask for."""

    label: str | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    prompt_mode: Literal["continue", "render"] | None = None
    past_reasoning: Literal["keep", "strip"] | None = None


class TrainingLine(BaseModel):
    """What a trainer says of one event (docs/training.md, "What is measured"): more fields by kind."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    kind: Literal["start", "step", "sync", "checkpoint", "eval"]
    step: int = Field(ge=0)
    """Steps done."""
    at: float


class TrainingRunRequest(ApiRequestModel):
    name: str = Field(min_length=1)
    config: dict[str, Any]
    lines: list[TrainingLine] = []
    """All that the run stands by: what else is known of it is forgotten."""


class TrainingLinesRequest(ApiRequestModel):
    first: int = Field(ge=0)
    """The place of the first of them among all lines of the run. What is known already stays as it is."""
    lines: list[TrainingLine]


class LeaseRequest(ApiRequestModel):
    consumer: str = Field(min_length=1)
    limit: int = Field(1, ge=1, le=1024)
    seconds: PositiveSeconds = 600.0
    """How long each group is the consumer's, unless extended."""
    policy_version: str | None = None
    """The trainer's own, from which staleness is counted."""
    max_staleness: int | None = Field(None, ge=0)
    """Groups that are more versions behind are dropped."""
    wait: float = Field(0.0, ge=0, le=300, allow_inf_nan=False)
    """Wait so long for a first group."""


class ExtendRequest(ApiRequestModel):
    seconds: PositiveSeconds


# Answers


class ErrorBody(ApiResponseModel):
    code: str
    """One of `ErrorCode`."""
    message: str
    detail: Any = None


class ErrorResponse(ApiResponseModel):
    error: ErrorBody


class RefusedTask(ApiResponseModel):
    """What cannot be a task: `where` is file and line, or its place in `task_specs`."""

    where: str
    name: str | None
    reason: str


class Job(ApiResponseModel):
    job_id: str
    status: Literal["open", "paused", "done", "cancelled"]
    label: str | None
    priority: int
    groups: int
    rollouts: dict[str, int]
    """How many of its rollouts have which status."""
    created_at: float
    ended_at: float | None
    paused_until: float | None = None
    error: str | None = None


class SubmittedJob(Job):
    new: bool
    """False: the idempotency key was known, and this is the job that it made."""
    refused: list[RefusedTask] = []


class Group(ApiResponseModel):
    group_id: str
    job_id: str | None
    task_id: str
    size: int
    wanted: int
    status: Literal["open", "finished", "cancelled"]
    reason: str | None
    delivery: Literal["open", "waiting", "leased", "delivered", "dropped"] | None
    """To a trainer; None: not offered to the feed."""
    created_at: float
    ended_at: float | None


class JobDetail(Job):
    """`group_list` in the order of submission."""

    group_list: list[Group]


class JobList(ApiResponseModel):
    """Newest first. The page before it: `before` = the last one's id."""

    jobs: list[Job]
    feed: dict[str, int]
    """How many groups are open, waiting, leased, delivered, dropped."""


class Rollout(ApiResponseModel):
    rollout_id: str
    group_id: str
    job_id: str | None
    task_id: str
    group_index: int
    seed: int | None
    status: str
    """queued, preparing, ready, running, scoring, done, failed, cancelled or timed_out."""
    cause: str | None
    """Machine-readable: why it failed, or why it is tried again."""
    attempt: int
    incomplete: bool
    """Capture broke: it is never trained on."""
    masked: bool
    """In its group's baseline, not trained on."""
    reward: float | None
    exit_code: int | None
    error: str | None
    session_id: str | None
    harness: str
    sandbox: str
    engine: str
    model: str
    calls: int
    traces: int
    prompt_tokens: int
    completion_tokens: int
    trained_tokens: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    wall_seconds: float | None
    """From the agent's begin to the end."""


class RolloutList(ApiResponseModel):
    """In the order of submission."""

    rollouts: list[Rollout]


class GroupDetail(Group):
    rollouts: list[Rollout]


class Stage(ApiResponseModel):
    """`outcome`: ok, failed, timed_out, cancelled; None while it lasts."""

    attempt: int
    stage: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    cause: str | None
    worker: str | None


class Reward(ApiResponseModel):
    reward_id: str
    rollout_id: str
    trace_id: str | None
    call_id: str | None
    source: str
    value: float | None
    detail: dict[str, Any]
    created_at: float


class RolloutDetail(Rollout):
    stages: list[Stage]
    rewards: list[Reward]
    """All that were ever given, oldest first; the newest of the rollout itself is its `reward`."""


class CancelResponse(ApiResponseModel):
    cancelled: str
    in_flight: list[str]
    """Rollouts that were under way, and are being ended."""


class CreatedSession(ApiResponseModel):
    session_id: str
    key: str
    """Shown once: only its hash is kept."""


class Lease(ApiResponseModel):
    lease_id: str
    group_id: str
    consumer: str
    expires_at: float
    staleness: int | None
    """How many policy versions the group's oldest rollout is behind; None where versions are not numbers."""
    policy_version: str | None = None
    """Under which its oldest rollout was dispatched."""


class LeaseResponse(ApiResponseModel):
    leases: list[Lease]
    dropped: list[str]
    """Groups that were too stale, and are offered to nobody any more."""


class LeaseEndResponse(ApiResponseModel):
    lease_id: str
    outcome: Literal["acknowledged", "returned"]


class LeaseExtendResponse(ApiResponseModel):
    lease_id: str
    expires_at: float


class TrainingRun(ApiResponseModel):
    run_id: str
    name: str
    created_at: float
    updated_at: float | None
    """When its trainer wrote its last line."""
    step: int
    """Steps done."""
    lines: int


class TrainingRunList(ApiResponseModel):
    runs: list[TrainingRun]


class TrainingRunDetail(TrainingRun):
    config: dict[str, Any]
    series: dict[str, dict[str, list[Any]]]
    """By kind (`step`, `eval`, `sync`) and name: lists of one length, null where a line has no such value."""


class FeedState(ApiResponseModel):
    depth: dict[str, int]
    dropped_reasons: dict[str, int]


class StageLimitState(ApiResponseModel):
    """A stage's gate: how many are inside and wait now, how many entered, and the seconds they waited together."""

    limit: int
    inside: int
    waiting: int
    entered: int
    waited_seconds: float
    refusals: dict[str, int]
    """Why nobody was let in, and how often that was the answer."""


class SandboxPoolState(ApiResponseModel):
    """Sandboxes opened ahead of need: how many wait, and what came of asking."""

    on_shelf: int
    size: int
    hits: int
    misses: int
    dead: int
    waited_seconds: float


class EngineState(ApiResponseModel):
    kind: str
    version: str
    model: str
    healthy: bool
    reason: str | None
    """Why it cannot answer."""
    load: dict[str, Any] | None = None
    """How busy it says it is; None where it does not say."""


class FleetState(ApiResponseModel):
    """All servers on the database."""

    state: Literal["working", "paused"]
    """Paused: none of them takes anything new."""
    paused_until: float | None
    in_flight: int
    """Rollouts that their services have."""


class ServiceState(ApiResponseModel):
    """The server, and the rollout service in it (`polar serve --work`), whose fields are None where it has none."""

    version: str
    engine: EngineState | None
    policy_version: str | None
    feed: dict[str, int]
    fleet: FleetState
    worker: str | None = None
    state: Literal["working", "paused"] | None = None
    """Paused: it takes nothing new, because it or all servers are paused."""
    paused_until: float | None = None
    """Of the pause of this server alone."""
    in_flight: int | None = None
    gates: dict[str, StageLimitState] | None = None
    pool: SandboxPoolState | None = None


class Event(ApiResponseModel):
    """A server-sent event. `id` is where to go on after a lost connection (`Last-Event-ID`, or `after`)."""

    id: str
    event: EventName
    data: dict[str, Any]


class CallbackPayload(ApiResponseModel):
    """What is posted to a job's `callback_url`: once or more often, each time under the same `webhook-id`."""

    type: Literal["group.finished", "group.cancelled", "job.ended"]
    timestamp: float
    data: dict[str, Any]
    """The group with its rollouts (as `GET /groups/{id}`), or the job (as `GET /jobs/{id}`)."""
