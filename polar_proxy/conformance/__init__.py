"""Conformance: each real agent program against the real gateway, with a scripted engine, counted from outside.

The program is installed by its adapter and runs in a sandbox. Between it and the gateway stands a TCP front that counts
answers and breaks connections; the engine answers with the tool calls which that program needs. Every cell of the
table is measured; what cannot be is said to be so. *Lost* and *doubled* are defined in `count`.
"""

from polar_proxy.conformance.checks import SCENARIO_CHECKS, CheckResult
from polar_proxy.conformance.measure import CHECK_NAMES, HarnessRow, measure
from polar_proxy.conformance.profiles import PROFILES, HarnessProfile, profile_of
from polar_proxy.conformance.report import document, markdown, merged
from polar_proxy.conformance.runner import ProgramRun, ScenarioRun, ScenarioRunner

__all__ = [
    "CHECK_NAMES",
    "PROFILES",
    "SCENARIO_CHECKS",
    "CheckResult",
    "HarnessProfile",
    "HarnessRow",
    "ProgramRun",
    "ScenarioRun",
    "ScenarioRunner",
    "document",
    "markdown",
    "measure",
    "merged",
    "profile_of",
]
