"""Response bodies of the HTTP API. They ignore unknown fields, so that an older client can read a newer server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from polar_proxy.documented import DocumentedModel

EventName = Literal["stage", "group", "job", "feed", "end"]
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


class ApiResponseModel(DocumentedModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ErrorBody(ApiResponseModel):
    """Why a request failed."""

    code: str
    """Machine-readable: bad_request, unauthorised, forbidden, not_found, conflict, pause_timed_out, drain_timed_out,
    lease_lost, invalid or unavailable."""
    message: str
    """The error and its remedy, in one or two sentences."""
    detail: Any = None
    """More about the error, depending on its code."""


class ErrorResponse(ApiResponseModel):
    """The body of every response with status 400 or more."""

    error: ErrorBody
    """Description of the error."""


class RefusedTask(ApiResponseModel):
    """A task that cannot be run."""

    where: str
    """File and line of the task, its folder, or its position in `task_specs`."""
    name: str | None
    """The task's id, if it has one."""
    reason: str
    """Why the task cannot be run."""


class Job(ApiResponseModel):
    """A job: groups of rollouts that were submitted together."""

    job_id: str
    """The id of the job."""
    status: Literal["open", "paused", "done", "cancelled"]
    """open, paused, done (all groups have ended) or cancelled."""
    label: str | None
    """The name given at submission."""
    priority: int
    """Jobs with a higher number run first."""
    repeat_of: str | None = None
    """Id of the rollout that the job repeats."""
    groups: int
    """Number of groups."""
    rollouts: dict[str, int]
    """Number of rollouts by status."""
    created_at: float
    """When the job was submitted."""
    ended_at: float | None
    """When the job ended."""
    paused_until: float | None = None
    """When a paused job resumes automatically."""
    error: str | None = None
    """Why no worker could run the job."""


class SubmittedJob(Job):
    """The response to a submission: the job, and the tasks that were refused."""

    new: bool
    """False if an earlier submission had the same idempotency key. The response then describes the job of that
    submission."""
    refused: list[RefusedTask] = Field([])
    """Tasks that cannot be run. No groups were made for these tasks."""


class Group(ApiResponseModel):
    """A group: the rollouts of one task that are compared with each other."""

    group_id: str
    """The id of the group."""
    job_id: str | None
    """Id of the job that the group belongs to."""
    task_id: str
    """Id of the task that all rollouts of the group run."""
    rollout_count: int
    """Number of rollouts that were queued for the group."""
    group_size: int
    """Number of rollouts that complete the group (see `group_policy`)."""
    status: Literal["open", "finished", "cancelled"]
    """open, finished or cancelled."""
    reason: str | None
    """Why the group was finished early or cancelled."""
    delivery: Literal["open", "waiting", "leased", "delivered", "dropped"] | None
    """State of the group in the trainer feed; null if the group is not for training."""
    created_at: float
    """When the group was created."""
    ended_at: float | None
    """When the group ended."""


class JobDetail(Job):
    """A job with its groups."""

    group_list: list[Group]
    """The groups, in the order of submission."""


class JobList(ApiResponseModel):
    """A page of jobs."""

    jobs: list[Job]
    """The jobs, newest first. For the next page, pass the id of the last one as `before`."""
    feed: dict[str, int]
    """Number of groups in each state of the trainer feed."""


class Rollout(ApiResponseModel):
    """A rollout: one run of an agent on a task."""

    rollout_id: str
    """The id of the rollout."""
    group_id: str
    """Id of the group that the rollout belongs to."""
    job_id: str | None
    """Id of the job that the rollout belongs to."""
    task_id: str
    """Id of the rollout's task."""
    group_index: int
    """Position of the rollout in its group."""
    seed: int | None
    """The seed of the task instance, if it has one."""
    status: str
    """queued, preparing, ready, running, scoring, done, failed, cancelled or timed_out."""
    cause: str | None
    """Machine-readable reason why the rollout did not end normally, or is tried again."""
    attempt: int
    """Number of the current or last attempt, from 1."""
    incomplete: bool
    """True if a call could not be recorded; such a rollout is never trained on."""
    masked: bool
    """True if the rollout's reward counts in the group's baseline but the rollout is not trained on."""
    reward: float | None
    """The newest reward of the rollout as a whole."""
    label: str | None = None
    """The newest label that a person gave."""
    rating: float | None = None
    """The newest rating that a person gave, from 1 to 5."""
    exit_code: int | None
    """Exit code of the agent; null if the agent was stopped."""
    error: str | None
    """Why the rollout failed, in words."""
    session_id: str | None
    """Id of the session of the last attempt."""
    harness: str
    """Name and version of the agent, separated by a space."""
    sandbox: str
    """The kind of sandbox."""
    engine: str
    """Name and version of the engine that the rollout uses, separated by a space."""
    model: str
    """The model that the engine serves."""
    calls: int
    """Number of recorded model calls."""
    traces: int
    """Number of traces built from the calls."""
    prompt_tokens: int
    """Sum of prompt tokens over all calls."""
    completion_tokens: int
    """Sum of sampled tokens over all calls."""
    price_usd: float | None
    """Sum, in US dollars, of the known prices of the rollout's calls; null if no price is known."""
    trained_tokens: int
    """Number of tokens with loss mask 1 in the rollout's traces."""
    created_at: float
    """When the rollout was submitted."""
    started_at: float | None
    """When the agent started."""
    ended_at: float | None
    """When the rollout ended."""
    wall_seconds: float | None
    """Seconds from the start of the agent to the end of the rollout."""


class RolloutList(ApiResponseModel):
    """A page of rollouts."""

    rollouts: list[Rollout]
    """The rollouts, in the order of submission."""
    note: str | None = None
    """Why no rollout matches `where`. For each condition that no rollout meets, the note lists recorded values of the
    condition's field. null if a rollout matches or `where` was not given."""


class GroupDetail(Group):
    """A group with its rollouts."""

    rollouts: list[Rollout]
    """All rollouts of the group, also those without traces, because their rewards count in the baseline."""


class Stage(ApiResponseModel):
    """One stage of one attempt at a rollout."""

    attempt: int
    """Number of the attempt, from 1."""
    stage: str
    """preparing, ready, running or scoring."""
    started_at: float
    """When the stage started."""
    ended_at: float | None
    """When the stage ended."""
    outcome: str | None
    """ok, failed, timed_out or cancelled; null while the stage runs."""
    cause: str | None
    """Machine-readable reason why the stage did not end with `ok`."""
    worker: str | None
    """The worker that ran the stage."""


class CancelResponse(ApiResponseModel):
    """The effect of a cancellation."""

    cancelled: str
    """The id that was cancelled."""
    in_flight: list[str]
    """Ids of the cancelled rollouts that were in progress. On this server these rollouts have ended; on other servers
    they end soon."""


class CreatedSession(ApiResponseModel):
    """A new session and its key."""

    session_id: str
    """The id of the session."""
    key: str
    """The key for the agent. It is shown once; only its hash is stored."""


class ApiKey(ApiResponseModel):
    """Description of a key of the HTTP API. The key itself is not stored."""

    name: str
    """The first twelve hexadecimal digits of the key's hash. The key is listed and revoked by this name."""
    role: str
    """admin or trainer."""
    label: str | None
    """The name given to the key."""
    created_at: float
    """When the key was created."""
    revoked_at: float | None
    """When the key was revoked; null while it is valid."""


class Lease(ApiResponseModel):
    """A group leased to one trainer."""

    lease_id: str
    """The id of the lease."""
    group_id: str
    """Id of the leased group."""
    consumer: str
    """The trainer that leased the group."""
    expires_at: float
    """When the lease expires."""
    staleness: int | None
    """The trainer's policy version minus the group's `policy_version`; null if a version is missing or not a
    number."""
    policy_version: str | None = None
    """The lowest policy version at which a finished rollout of the group was claimed; null if a version is missing or
    not a number."""


class LeaseResponse(ApiResponseModel):
    """The response to a request for groups: the groups that were leased, and the groups that were dropped."""

    leases: list[Lease]
    """The leases, oldest group first."""
    dropped: list[str]
    """Groups that were too stale; they are never leased again."""


class LeaseEndResponse(ApiResponseModel):
    """The end of a lease."""

    lease_id: str
    """The id of the lease."""
    outcome: Literal["acknowledged", "returned"]
    """acknowledged (trained on) or returned (unused)."""


class LeaseExtendResponse(ApiResponseModel):
    """The new expiry of a lease."""

    lease_id: str
    """The id of the lease."""
    expires_at: float
    """The new time at which the lease expires."""


class TrainingRun(ApiResponseModel):
    """A training run."""

    run_id: str
    """The id of the run."""
    name: str
    """The name of the run."""
    created_at: float
    """When the run was registered."""
    updated_at: float | None
    """When the trainer wrote the last line of the metrics log."""
    step: int
    """Number of completed steps."""
    lines: int
    """Number of lines of the metrics log."""


class TrainingRunList(ApiResponseModel):
    """All training runs."""

    runs: list[TrainingRun]
    """The runs, newest first."""


class TrainingRunDetail(TrainingRun):
    """A training run with its settings and curves."""

    config: dict[str, Any]
    """The settings of the run."""
    series: dict[str, dict[str, list[Any]]]
    """Curves by kind of line (`step`, `eval`, `sync`) and by name. The lists of one kind are of equal length, with null
    where a line has no such value."""


class FeedState(ApiResponseModel):
    """The state of the trainer feed."""

    depth: dict[str, int]
    """Number of groups in each state: open (unfinished), waiting, leased, delivered, dropped. States without groups are
    left out."""
    dropped_reasons: dict[str, int]
    """Number of dropped groups by reason."""


class StageLimitState(ApiResponseModel):
    """How full a stage is."""

    limit: int
    """Maximum number of rollouts in the stage."""
    inside: int
    """Number of rollouts in the stage now."""
    waiting: int
    """Number of rollouts that wait to enter the stage."""
    entered: int
    """Number of rollouts that have entered the stage since the server started."""
    waited_seconds: float
    """Total number of seconds that the rollouts in `entered` waited before they entered."""
    refusals: dict[str, int]
    """Number of times that a rollout was not admitted, by reason."""


class SandboxPoolState(ApiResponseModel):
    """The pool of sandboxes that are opened before they are needed."""

    waiting: int
    """Number of sandboxes in the pool, ready or opening."""
    size: int
    """Maximum number of sandboxes in the pool."""
    hits: int
    """Number of requests that got a sandbox from the pool."""
    misses: int
    """Number of requests for which a new sandbox was opened."""
    dead: int
    """Number of sandboxes of the pool that could not be used, because they had died or failed to open."""
    waited_seconds: float
    """Seconds that all requests waited in total."""


class EngineState(ApiResponseModel):
    """The inference engine."""

    kind: str
    """Kind of engine, such as `vllm`."""
    version: str
    """Version of the engine."""
    model: str
    """The served model."""
    policy_version: str | None = None
    """Version of the weights that the engine samples from; null if unknown."""
    healthy: bool
    """True if the engine can answer requests."""
    reason: str | None
    """Why the engine cannot answer requests."""
    load: dict[str, Any] | None = None
    """How busy the engine is; null if it does not report this."""


class FleetState(ApiResponseModel):
    """All servers of the database together."""

    state: Literal["working", "paused"]
    """working, or paused (no server starts a rollout)."""
    paused_until: float | None
    """When all servers resume automatically."""
    in_flight: int
    """Number of rollouts that are in flight, on all servers together."""


class ServiceState(ApiResponseModel):
    """State of a server. On a server without rollout workers, the fields from `worker` on are null."""

    version: str
    """Version of Polar."""
    engine: EngineState | None
    """State of the engine that this server samples from."""
    engines: dict[str, EngineState] = Field({})
    """State of each engine in the settings [engines], by name."""
    policy_version: str | None
    """Version of the weights that the engine samples from."""
    feed: dict[str, int]
    """Number of groups in each state of the trainer feed."""
    fleet: FleetState
    """All servers of the database."""
    worker: str | None = None
    """Name of this server's rollout service."""
    state: Literal["working", "paused"] | None = None
    """working, or paused (this server starts no rollout, because this server alone or all servers are paused)."""
    paused_until: float | None = None
    """When this server's own pause ends. A pause of all servers is in `fleet`."""
    problem: str | None = None
    """Why this server paused itself, if it did. It does so if its sandboxes fail their self-test, because programs may
    then be able to break out."""
    in_flight: int | None = None
    """Number of rollouts that this server works on."""
    stages: dict[str, StageLimitState] | None = None
    """How full each stage is."""
    pool: SandboxPoolState | None = None
    """The sandbox pool of this server's rollout service."""


class Event(ApiResponseModel):
    """A server-sent event."""

    id: str
    """Position in the stream. To continue after this event, send this id as `Last-Event-ID` or `after`."""
    event: EventName
    """The kind of event."""
    data: dict[str, Any]
    """Data of the event; its fields depend on `event`."""


class CallbackPayload(ApiResponseModel):
    """The body of a POST to a job's `callback_url`. Repeated deliveries have the same `webhook-id`."""

    type: Literal["group.finished", "group.cancelled", "job.ended"]
    """The event that is reported."""
    timestamp: float
    """When the reported event happened."""
    data: dict[str, Any]
    """The group as `GET /groups/{id}` returns it, or the job as `GET /jobs/{id}` returns it."""
