"""From recorded calls to training sequences."""

from polar_proxy.trajectories.account import AccountingError, account, accounting
from polar_proxy.trajectories.build import BUILDERS, ON_DRIFT, build
from polar_proxy.trajectories.drift import Finding, drift, findings
from polar_proxy.trajectories.exclude import excluded_calls, exclusion
from polar_proxy.trajectories.grade import TRAINABLE, grade_of
from polar_proxy.trajectories.line import Built
from polar_proxy.trajectories.merge import merged, per_call
from polar_proxy.trajectories.paths import Path, path
from polar_proxy.trajectories.rescore import rescore
from polar_proxy.trajectories.tree import tree

__all__ = [
    "BUILDERS",
    "ON_DRIFT",
    "TRAINABLE",
    "AccountingError",
    "Built",
    "Finding",
    "Path",
    "account",
    "accounting",
    "build",
    "drift",
    "excluded_calls",
    "exclusion",
    "findings",
    "grade_of",
    "merged",
    "path",
    "per_call",
    "rescore",
    "tree",
]
