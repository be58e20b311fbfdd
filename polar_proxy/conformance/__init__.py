"""Conformance: each real agent program against the real gateway, with a scripted engine, counted from outside.

The program is installed by its adapter and runs in a sandbox. Between it and the gateway stands a TCP front that counts
answers and breaks connections; the engine answers with the tool calls which that program needs. Every cell of the
table is measured; what cannot be is said to be so. *Lost* and *doubled* are defined in `count`.
"""

from polar_proxy.conformance.bench import Bench, Run, Start
from polar_proxy.conformance.judge import JUDGES, Cell
from polar_proxy.conformance.measure import CHECKS, Row, measure
from polar_proxy.conformance.profiles import PROFILES, Profile, profile_of
from polar_proxy.conformance.report import document, markdown, merged

__all__ = [
    "CHECKS",
    "JUDGES",
    "PROFILES",
    "Bench",
    "Cell",
    "Profile",
    "Row",
    "Run",
    "Start",
    "document",
    "markdown",
    "measure",
    "merged",
    "profile_of",
]
