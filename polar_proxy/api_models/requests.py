"""Request bodies of the HTTP API. They reject unknown fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from polar_proxy.documented import DocumentedModel
from polar_proxy.rollout_spec import MAX_INTEGER, JobSpec, SessionBudget
from polar_proxy.types import RemarkKind

Role = Literal["admin", "trainer"]
Scope = Literal["server", "all"]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WaitSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ApiRequestModel(DocumentedModel):
    # Built at once: FastAPI would warn of a body's alias at the first request.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=False)


class JobRequest(JobSpec):
    """Rollouts of one or more tasks. For a field that is omitted or null, the value in [run] of the server's settings
    is used, or the field's default if [run] has no such field. With `repeat_of`, the value of the original rollout is
    used instead."""

    model_config = ConfigDict(defer_build=False)

    task: str | None = None
    """The task, as for `polar run`: a task family, a file or folder on the server's machine, module:Class or
    module:function."""
    task_specs: list[dict[str, Any]] | None = None
    """The tasks themselves, each as in a line of a task file."""
    seed: int | None = Field(None, ge=0, le=MAX_INTEGER)
    """The first task of the job. If `task` is a family or a class: the seed of this task. If `task` is a file, a folder
    or a function: the position of this task, counted from 0. Without `instances`, this is the only task of the job."""
    instances: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Maximum number of tasks in the job, from the task `seed` on. If this and `seed` are omitted, the job has one task
    of a family or a class, and all tasks of any other source."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_source(self) -> JobRequest:
        if [self.task, self.task_specs, self.repeat_of].count(None) != 2:
            raise ValueError("give one of task, task_specs and repeat_of")
        if self.task is None and self.seed is not None:
            raise ValueError("seed can be given with task only, not with task_specs or repeat_of")
        if self.repeat_of is not None and self.instances is not None:
            raise ValueError("instances cannot be given with repeat_of, which repeats one task")
        return self


class PauseRequest(ApiRequestModel):
    """How long to pause, and whether to wait until no rollout runs."""

    seconds: PositiveSeconds | None = None
    """Resume automatically after this many seconds. Omit it to pause until resumed."""
    wait_idle: WaitSeconds | None = None
    """Wait up to this many seconds until no rollout runs any more, and respond then. If a rollout still runs after this
    time, the pause is undone and the response is 409."""


class ServicePauseRequest(PauseRequest):
    """How long to pause, and which servers."""

    scope: Scope = "server"
    """`server`: the server that receives the request; `all`: every server of its database."""


class ServiceResumeRequest(ApiRequestModel):
    """Which servers to resume."""

    scope: Scope = "server"
    """`server`: the server that receives the request; `all`: every server of its database."""


class DrainRequest(ApiRequestModel):
    """Which servers to drain, and how long to wait."""

    scope: Scope = "server"
    """`server`: the server that receives the request; `all`: every server of its database."""
    timeout: WaitSeconds | None = 600.0
    """Seconds to wait for running rollouts; null waits without limit."""


class FeedbackRequest(ApiRequestModel):
    """A reward or a remark for a rollout, or for a session without a rollout."""

    rollout_id: str | None = None
    """Id of the rollout."""
    session_id: str | None = None
    """Id of the session, if it has no rollout."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if (self.rollout_id is None) == (self.session_id is None):
            raise ValueError("give either rollout_id or session_id")
        return self


class RewardRequest(FeedbackRequest):
    """A reward from outside Polar for a rollout or a session, or for a single call or trace of the rollout or
    session."""

    value: float | None = Field(allow_inf_nan=False)
    """The reward; null if the work could not be judged, which is not the same as 0."""
    source: str = Field(min_length=1)
    """Source of the reward, such as `human:anna` or `ci`."""
    call_id: str | None = None
    """Reward only this call of the rollout or session."""
    trace_id: str | None = None
    """Reward only this trace of the rollout or session."""
    detail: dict[str, Any] = Field(default_factory=dict)
    """Any JSON object to store with the reward."""

    @model_validator(mode="after")
    def _check_part(self) -> RewardRequest:
        if self.call_id is not None and self.trace_id is not None:
            raise ValueError("give call_id or trace_id, not both")
        return self


class RemarkRequest(FeedbackRequest):
    """A label, a note or a rating for a rollout or a session. The API key of the request is recorded as the author of
    the remark."""

    kind: RemarkKind
    """label, note or rating."""
    text: str = ""
    """The text of a label or note."""
    value: float | None = Field(None, allow_inf_nan=False)
    """The rating, from 1 to 5."""


class SessionRequest(ApiRequestModel, SessionBudget):
    """A session for an agent that you start yourself. The settings of the session override the settings in the agent's
    requests."""

    model_config = ConfigDict(defer_build=False)

    label: str | None = None
    """A name to find the session by."""
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Sample at this temperature, without top_p, top_k, min_p, penalties and logit_bias."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    """Upper limit of tokens in one answer."""
    prompt_mode: Literal["continue", "render"] | None = None
    """How prompts are built; see the setting `gateway.prompt_mode`."""
    past_reasoning: Literal["keep", "strip"] | None = None
    """Treatment of the reasoning of earlier turns in continued prompts; see the setting `gateway.past_reasoning`."""


class KeyRequest(ApiRequestModel):
    """A new key of the HTTP API."""

    role: Role
    """admin (everything) or trainer (read, use the feed, add rewards, pause)."""
    label: str | None = None
    """A name to find the key by."""


class TrainingLine(DocumentedModel):
    """One line of a trainer's metrics log (metrics.jsonl). Further fields depend on `kind` (docs/guide/training.md)."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=False)

    kind: Literal["start", "step", "sync", "checkpoint", "eval"]
    """The kind of event that the line reports."""
    step: int = Field(ge=0, le=MAX_INTEGER)
    """Number of completed steps."""
    at: float
    """When the line was written."""


class TrainingRunRequest(ApiRequestModel):
    """A training run with all lines of its metrics log so far."""

    name: str = Field(min_length=1)
    """The name of the run."""
    config: dict[str, Any]
    """The settings of the run."""
    lines: list[TrainingLine] = Field([])
    """All lines of the run. They replace the lines that the server has stored."""


class TrainingLinesRequest(ApiRequestModel):
    """New lines to append to the stored metrics log of a training run."""

    first: int = Field(ge=0, le=MAX_INTEGER)
    """Index of the first of these lines among all lines of the run. Lines that the server already has are skipped."""
    lines: list[TrainingLine]
    """The new lines, in order."""


class LeaseRequest(ApiRequestModel):
    """A request for finished groups to train on."""

    consumer: str = Field(min_length=1)
    """A name of the trainer that leases the groups."""
    limit: int = Field(1, ge=1, le=1024)
    """Lease at most this many groups."""
    seconds: PositiveSeconds = 600.0
    """Seconds until the leases expire, unless they are extended."""
    policy_version: str | None = None
    """The trainer's current policy version, from which staleness is counted."""
    max_staleness: int | None = Field(None, ge=0, le=MAX_INTEGER)
    """Drop groups that are more than this many policy versions old, and groups of unknown age. Needs a
    `policy_version` that is a whole number."""
    wait: float = Field(0.0, ge=0, le=300, allow_inf_nan=False)
    """Wait up to this many seconds if no group is ready."""


class ExtendRequest(ApiRequestModel):
    """A new expiry of a lease."""

    seconds: PositiveSeconds
    """Seconds from now until the lease expires."""
