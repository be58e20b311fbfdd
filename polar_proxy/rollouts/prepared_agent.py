"""An agent that is ready in its sandbox. Each text of the user starts the agent's program once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness_adapters.base import ExitOutcome, LaunchContext, LaunchPlan
from polar_proxy.rollouts.agent_patch import BaseTree
from polar_proxy.rollouts.harnesses import ReadyHarness
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from sandboxes.base import ExecResult, Sandbox

# OpenHands prints its complete first prompt after the event that says why it failed.
_LOG_TAIL_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class PreparedAgent:
    """An agent that is ready to start: its sandbox with the workspace and the harness's files, and its launch plan."""

    harness: ReadyHarness
    task_sandboxes: TaskSandboxes
    sandbox: Sandbox
    base: BaseTree
    """The workspace before the agent starts. The agent's patch is the difference from it."""
    context: LaunchContext
    plan: LaunchPlan
    """How to start the agent on the task's instruction."""
    session_id: str
    """Id of the session that records the agent's calls."""

    async def exec(self, text: str, resume: bool, seconds: float) -> ExecResult:
        """Start the agent on a text of the user: the instruction or, with `resume`, a later message of a dialogue."""
        plan = self.plan
        if resume:
            plan = self.harness.adapter.launch(
                self.harness.installed, replace(self.context, instruction=text, resume=True)
            )
            await write_files(self.sandbox, plan)
        return await self.sandbox.exec(plan.argv, env=plan.env, cwd=self.sandbox.workdir, timeout=seconds)

    def interpret(self, process: ExecResult, *, stopped: bool = False) -> tuple[int | None, ExitOutcome, str]:
        """Return (exit code, outcome, message) of a run of the agent. `stopped`: the agent was stopped from outside.

        The exit code is None if the agent was stopped or ran out of time."""
        exit_code = None if process.timed_out or stopped else process.exit_code
        tail = (process.stdout + process.stderr)[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return exit_code, *self.harness.adapter.interpret(exit_code, tail)


async def write_files(sandbox: Sandbox, plan: LaunchPlan) -> None:
    """Write the files of a launch plan into the sandbox's home."""
    for name, text in plan.files.items():
        await sandbox.write(f"{sandbox.home}/{name}", text.encode(), 0o600)
