"""Response bodies: a reward, a remark, and a rollout with its stages, rewards and remarks."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from polar_proxy.api_models.responses import ApiResponseModel, Rollout, Stage


class Reward(ApiResponseModel):
    """A stored reward."""

    reward_id: str
    """The id of the reward."""
    rollout_id: str | None
    """Id of the rewarded rollout; null if a session without a rollout was rewarded."""
    session_id: str | None = None
    """Id of the rewarded session, if it has no rollout."""
    trace_id: str | None
    """Id of the trace, if the reward is for a single trace."""
    call_id: str | None
    """Id of the call, if the reward is for a single call."""
    source: str
    """Source of the reward, such as `human:anna`."""
    value: float | None
    """The reward; null if the work could not be judged."""
    detail: dict[str, Any]
    """The JSON object that was stored with the reward."""
    created_at: float
    """When the reward was given."""


class Remark(ApiResponseModel):
    """A label, a note or a rating that a person gave."""

    remark_id: str
    """The id of the remark."""
    rollout_id: str | None
    """Id of the rollout; null if the remark is of a session without a rollout."""
    session_id: str | None
    """Id of the session, if it has no rollout."""
    kind: str
    """label, note or rating."""
    text: str | None
    """The text of a label or note."""
    value: float | None
    """The rating, from 1 to 5."""
    author: str
    """Label and name of the API key with which the remark was given."""
    created_at: float
    """When the remark was given."""


class RolloutDetail(Rollout):
    """A rollout with its stages, rewards and remarks."""

    repeat_of: str | None = None
    """Id of the rollout that this one repeats."""
    stages: list[Stage]
    """The stages of all attempts, in order."""
    rewards: list[Reward]
    """All rewards of the rollout, its traces and its calls, oldest first. The field `reward` has the newest reward of
    the rollout as a whole."""
    remarks: list[Remark] = Field([])
    """All labels, notes and ratings, oldest first."""
