"""Patches that want a reward without solving the task. Each is a shell script of the agent.

The attacker knows the hidden tests' names and places, Polar's source, and the module that the tests import. In a
script, ``$MODULE`` is this module's path and ``$TEST`` the path of a hidden test file.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks._attacks.reward_patches import (
    assertions,
    planted_files,
    pytest_internals,
    runner_objects,
    surroundings,
    verdicts,
)
from benchmarks._attacks.reward_patches.patch import RewardPatch

CLASSES = (planted_files, assertions, verdicts, runner_objects, pytest_internals, surroundings)


def patches(tests: tuple[str, ...]) -> Mapping[str, RewardPatch]:
    """Return the patches by name; `tests` are the ids of the tests that decide the reward."""
    return {name: patch for one in CLASSES for name, patch in one.patches(tests).items()}
