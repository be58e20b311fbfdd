"""Traces: from recorded calls to training sequences.

builders     calls -> traces            validation  the check of a build
grades       calls that are not trained, and how far a trace can be trusted
drift        prompts that differ, and why
certificate  what proves a trace        rows        traces as JSON lines
check        the checker of a file of rows
scoring      log-probabilities from an engine
audit        recorded against fresh     operations  all of it on a store
"""

from polar_proxy.traces.builders import BUILDERS, ON_DRIFT, BuildResult, build
from polar_proxy.traces.certificate import Certificate, CertificateError, certify, restore
from polar_proxy.traces.drift import DriftEvent, drift_events
from polar_proxy.traces.grades import TRAINABLE, exclusion_reason
from polar_proxy.traces.validation import InvariantError, validate

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
    "drift_events",
    "exclusion_reason",
    "restore",
    "validate",
]
