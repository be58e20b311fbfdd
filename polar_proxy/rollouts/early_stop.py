"""Rollouts that can no longer matter, because nothing that their evaluators reward can be reached any more.

Only a task knows that, so a task says so, in its metadata:

    "stop_when": {"command": ["sh", "-c", "test ! -d src"], "every": 30}

The command runs in the agent's own sandbox every so many seconds while the agent works; when its exit status is 0, the
agent is ended. What it leaves is scored as ever: the check saves time and never makes a reward. So an agent that
deceives it gains nothing. It must hold no secret, for the agent can see it run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polar_proxy.errors import BadTaskError
from sandboxes import SandboxError

log = logging.getLogger(__name__)

CAUSE = "lost"
"""Of a rollout that was ended early."""
_LIMIT_SECONDS = 30.0
"""Of the command. One that is slower says nothing."""


class StoppableSandbox(Protocol):
    """What is needed of a sandbox."""

    async def exec(self, argv: Sequence[str], *, timeout: float | None = None) -> Any: ...
    async def kill_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EarlyStopCheck:
    """How it is seen that a rollout is lost."""

    command: tuple[str, ...]
    every: float = 30.0
    """Seconds."""


@dataclass(slots=True)
class EarlyStop:
    """`reason`: why the agent was ended, if it was."""

    reason: str | None = None


@contextlib.asynccontextmanager
async def stop_early(sandbox: StoppableSandbox, check: EarlyStopCheck | None) -> AsyncIterator[EarlyStop]:
    """While the block runs an agent: ask the check, and end everything in the sandbox once it says that all is lost."""
    early = EarlyStop()

    async def watch(check: EarlyStopCheck) -> None:
        try:
            while early.reason is None:
                await asyncio.sleep(check.every)
                result = await sandbox.exec(check.command, timeout=_LIMIT_SECONDS)
                if result.exit_code == 0 and not result.timed_out:
                    early.reason = "the task's own check says that nothing can be won any more"
            await sandbox.kill_all()
        except SandboxError as error:  # if it is gone, whoever runs the agent in it is told
            log.warning("the check for a lost rollout cannot be run any more: %s", error)

    watching = None if check is None else asyncio.create_task(watch(check))
    try:
        yield early
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def early_stop_check(metadata: Mapping[str, Any]) -> EarlyStopCheck | None:
    """What a task says of itself; None where it says nothing. Raises BadTaskError."""
    said = metadata.get("stop_when")
    if said is None:
        return None
    if not isinstance(said, Mapping) or not set(said) <= {"command", "every"}:
        raise BadTaskError("stop_when must be {command, every}")
    command, every = said.get("command"), said.get("every", 30.0)
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise BadTaskError("stop_when.command must be a list of words")
    if isinstance(every, bool) or not isinstance(every, int | float) or not every > 0:
        raise BadTaskError("stop_when.every must be a number of seconds above 0")
    return EarlyStopCheck(tuple(command), float(every))
