"""From recorded calls to training sequences."""

from polar_proxy.traces.build import BUILDERS, ON_DRIFT, build
from polar_proxy.traces.builders import merged, per_call
from polar_proxy.traces.certificate import CertificateError, certificates, expand, stored
from polar_proxy.traces.drift import DriftEvent, drift_events, find_drift
from polar_proxy.traces.exclusions import excluded_calls, exclusion_reason
from polar_proxy.traces.grades import TRAINABLE, grade_of
from polar_proxy.traces.paths import TracePath, trace_path
from polar_proxy.traces.rescore import rescore
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.traces.tree import tree
from polar_proxy.traces.validation import InvariantError, count_calls, validate

__all__ = [
    "BUILDERS",
    "ON_DRIFT",
    "TRAINABLE",
    "BuildResult",
    "CertificateError",
    "DriftEvent",
    "InvariantError",
    "TracePath",
    "build",
    "certificates",
    "count_calls",
    "drift_events",
    "excluded_calls",
    "exclusion_reason",
    "expand",
    "find_drift",
    "grade_of",
    "merged",
    "per_call",
    "rescore",
    "stored",
    "trace_path",
    "tree",
    "validate",
]
