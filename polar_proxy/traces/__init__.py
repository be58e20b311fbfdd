"""Traces: from recorded calls to training sequences.

builders    calls -> traces            validation   the check of a build
drift       prompts that differ        exclusions   calls that are not trained
grades      how reliable a trace is    certificate  what proves a trace
rows        traces as JSON lines       check        the checker of a file of rows
audit       recorded against fresh     operations   all of it on a store
"""

from polar_proxy.traces.builders import BUILDERS, ON_DRIFT, BuildResult, build, merged, per_call, tree
from polar_proxy.traces.certificate import Certificate
from polar_proxy.traces.certify import CertificateError, certify, restore
from polar_proxy.traces.drift import DriftEvent, drift_events, find_drift
from polar_proxy.traces.exclusions import excluded_calls, exclusion_reason
from polar_proxy.traces.grades import TRAINABLE, grade_of
from polar_proxy.traces.validation import InvariantError, count_calls, validate

__all__ = [
    "BUILDERS",
    "ON_DRIFT",
    "TRAINABLE",
    "BuildResult",
    "Certificate",
    "CertificateError",
    "DriftEvent",
    "InvariantError",
    "build",
    "certify",
    "count_calls",
    "drift_events",
    "excluded_calls",
    "exclusion_reason",
    "find_drift",
    "grade_of",
    "merged",
    "per_call",
    "restore",
    "tree",
    "validate",
]
