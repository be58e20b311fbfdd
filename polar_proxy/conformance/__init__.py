"""Conformance: every real agent program against the real gateway, with a scripted engine, measured from outside.

The program is installed by its adapter and runs in a sandbox (`runner.py`). Between it and the gateway a TCP proxy
records exchanges and breaks connections (`recording_proxy.py`). The engine answers with the tool calls that the program
needs (`scripted_model.py`, `profiles.py`). Each check has a measured result; what cannot be measured is marked as such
(`checks.py`, which also defines *lost* and *doubled*).
"""

from polar_proxy.conformance.checks import SCENARIO_CHECKS, CheckResult
from polar_proxy.conformance.measure import CHECK_NAMES, HarnessRow, install_and_measure, measure
from polar_proxy.conformance.profiles import PROFILES, HarnessProfile, profile_of
from polar_proxy.conformance.report import document, is_good, markdown, merged, save
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
    "install_and_measure",
    "is_good",
    "markdown",
    "measure",
    "merged",
    "profile_of",
    "save",
]
