"""From recorded calls to training sequences."""

from polar_proxy.trajectories.account import AccountingError, account, accounting
from polar_proxy.trajectories.build import BUILDERS, ON_DRIFT, build
from polar_proxy.trajectories.certificate import CertificateError, certificates, expand, stored
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
    "CertificateError",
    "Finding",
    "Path",
    "account",
    "accounting",
    "build",
    "certificates",
    "drift",
    "excluded_calls",
    "exclusion",
    "expand",
    "findings",
    "grade_of",
    "merged",
    "path",
    "per_call",
    "rescore",
    "stored",
    "tree",
]
