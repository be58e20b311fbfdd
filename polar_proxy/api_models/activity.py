"""Response bodies that describe the current activity of the servers. `polar top` shows them."""

from __future__ import annotations

from polar_proxy.api_models.responses import ApiResponseModel


class ActivityRates(ApiResponseModel):
    """Counts of calls and rollouts that ended in the last minute."""

    calls: int
    """Number of calls."""
    failed_calls: int
    """Number of calls without a complete answer."""
    prompt_tokens: int
    """Number of prompt tokens of the calls."""
    cached_tokens: int
    """Number of prompt tokens that the engine had in its cache."""
    completion_tokens: int
    """Number of sampled tokens of the calls."""
    rollouts: int
    """Number of rollouts."""
    rollouts_not_done: int
    """Number of rollouts that failed, timed out or were cancelled."""


class ActiveSession(ApiResponseModel):
    """A session with a call in the last five minutes. The counts are those of the whole session."""

    session_id: str
    """The id of the session."""
    label: str | None
    """Label of the session."""
    rollout_id: str | None
    """Id of the rollout that the session records."""
    calls: int
    """Number of recorded calls."""
    failed_calls: int
    """Number of calls that failed."""
    completion_tokens: int
    """Number of sampled tokens of all calls."""
    last_call_at: float | None
    """When the session's last call ended."""


class Failure(ApiResponseModel):
    """A call or a rollout that failed."""

    at: float
    """When the call or rollout ended."""
    record_id: str
    """The id of the call or of the rollout."""
    session_id: str | None
    """The session of the call or of the rollout."""
    what: str
    """The status of the call; for a rollout, its status and the cause of the failure."""
    error: str | None
    """Why the call or rollout failed, shortened."""


class Activity(ApiResponseModel):
    """The current activity of all servers of the database."""

    rates: ActivityRates
    """Counts of the last minute."""
    rollouts: dict[str, int]
    """Number of unfinished rollouts by status."""
    sessions: list[ActiveSession]
    """The active sessions, at most ten. The session with the newest call comes first."""
    failures: list[Failure]
    """The newest failures of the last half hour, at most ten, newest first."""
