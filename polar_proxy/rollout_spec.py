"""What the rollouts of a job are made with, and how the store keeps it: in `rollouts.config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Self

from pydantic import TypeAdapter, ValidationError

from polar_proxy.config import RunSettings
from polar_proxy.errors import UsageError
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How a rollout is made, its task aside."""

    harness: str
    """NAME[@VERSION], module:Class, or shell:COMMAND."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process"] = "auto"
    temperature: float = 1.0
    timeout: float = 600.0
    """Seconds the agent may run; waiting, preparing and scoring are not counted."""
    max_tokens: int = 2048
    """Limit of one answer."""
    train_timed_out: bool = False
    """Train on rollouts that ran out of time, too. A task may say so itself: `train_timed_out` in its metadata."""

    @classmethod
    def of(cls, run: RunSettings) -> Self:
        return cls(run.harness, run.sandbox, run.temperature, run.timeout, run.max_tokens)

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """What `to_json` wrote. Raises UsageError for what this version cannot read."""
        try:
            return TypeAdapter(cls).validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"Bad rollout configuration {where}: {first['msg']}.") from None

    def policy(self) -> dict[str, float | int]:
        """The sampling policy of its session: from the whole distribution, so that the recorded log-probabilities are
        those of the samples."""
        return {"temperature": self.temperature, "top_p": 1.0, "top_k": 0, "max_tokens": self.max_tokens}
