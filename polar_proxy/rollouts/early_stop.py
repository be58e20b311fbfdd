"""Stops an agent early when a check of its task shows that it can no longer succeed.

The check is in the task's metadata:

    "stop_when": {"command": ["sh", "-c", "test ! -d src"], "every": 30}

The command runs in the agent's own sandbox every `every` seconds while the agent works. When its exit status is 0, the
agent is stopped, and its work is scored as usual. The check saves time and never decides the reward, so an agent gains
nothing by deceiving it. The command must not contain a secret, because the agent can see it run.
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
"""The recorded cause of a rollout whose agent was stopped early."""
_COMMAND_SECONDS = 30.0
"""A command that takes longer counts as failed."""


class StoppableSandbox(Protocol):
    """The part of a sandbox that early stopping uses."""

    async def exec(self, argv: Sequence[str], *, timeout: float | None = None) -> Any: ...
    async def kill_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EarlyStopCheck:
    """The command that decides whether to stop, and how often it runs."""

    command: tuple[str, ...]
    every: float = 30.0
    """Seconds."""


@dataclass(slots=True)
class EarlyStop:
    """`reason` says why the agent was stopped; None if it was not."""

    reason: str | None = None


@contextlib.asynccontextmanager
async def stop_early(sandbox: StoppableSandbox, check: EarlyStopCheck | None) -> AsyncIterator[EarlyStop]:
    """Run the check while the block runs an agent, and kill everything in the sandbox when the check succeeds."""
    early = EarlyStop()

    async def watch(check: EarlyStopCheck) -> None:
        try:
            while early.reason is None:
                await asyncio.sleep(check.every)
                result = await sandbox.exec(check.command, timeout=_COMMAND_SECONDS)
                if result.exit_code == 0 and not result.timed_out:
                    early.reason = "the task's stop_when command says that nothing can be won any more"
            await sandbox.kill_all()
        except SandboxError as error:  # if the sandbox is gone, the agent's own command fails as well
            log.warning("the stop_when command can no longer be run: %s", error)

    watching = None if check is None else asyncio.create_task(watch(check))
    try:
        yield early
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def early_stop_check(metadata: Mapping[str, Any]) -> EarlyStopCheck | None:
    """Return the check in a task's metadata, or None if there is none. Raises BadTaskError."""
    given = metadata.get("stop_when")
    if given is None:
        return None
    if not isinstance(given, Mapping) or not set(given) <= {"command", "every"}:
        raise BadTaskError("stop_when must be {command, every}")
    command, every = given.get("command"), given.get("every", 30.0)
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise BadTaskError("stop_when.command must be a list of words")
    if isinstance(every, bool) or not isinstance(every, int | float) or not every > 0:
        raise BadTaskError("stop_when.every must be a number of seconds above 0")
    return EarlyStopCheck(tuple(command), float(every))
