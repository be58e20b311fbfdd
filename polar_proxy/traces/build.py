"""The builders by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polar_proxy.errors import UsageError
from polar_proxy.traces.builders import merged, per_call
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.traces.tree import tree
from polar_proxy.types import CallRecord

__all__ = ["BUILDERS", "ON_DRIFT", "BuildResult", "build", "merged", "per_call", "tree"]

BUILDERS: dict[str, Callable[..., BuildResult]] = {"per_call": per_call, "merged": merged, "tree": tree}
ON_DRIFT = ("split", "canonical", "rescore")


def build(
    calls: Sequence[CallRecord],
    builder: str = "merged",
    *,
    on_drift: str = "split",
    rollout_id: str | None = None,
    reward: float | None = None,
) -> BuildResult:
    """The traces of a session's calls, accounted for. Pure: calls in, traces out.

    Of `on_drift = rescore` the log-probabilities are still those of sampling: `rescore` asks the engine. Raises
    UsageError for a builder or a policy that is none.
    """
    if builder not in BUILDERS:
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join(BUILDERS)}.")
    if on_drift not in ON_DRIFT:
        raise UsageError(f"On drift a builder can {', '.join(ON_DRIFT)}, not {on_drift!r}.")
    if builder == "merged":
        return merged(calls, rollout_id=rollout_id, reward=reward, on_drift=on_drift)  # type: ignore[arg-type]
    if on_drift != "split":
        raise UsageError(f"--on-drift is for the builder merged: {builder} joins nothing that drifted.")
    return BUILDERS[builder](calls, rollout_id=rollout_id, reward=reward)
