# mypy: ignore-errors
"""Runs harbor's Terminus 2 agent on this machine. The `terminus-2` adapter launches this program.

The program runs inside the sandbox, with the Python of the virtual environment in which harbor is installed. No module
imports it. Harbor itself starts the agent only in its own trials: on the host, with an environment object through which
the agent reaches its container. Here that object (`LocalEnvironment`) represents the machine that runs this program.

The endpoint's key comes in OPENAI_API_KEY and is removed from the environment of the agent's terminal.

Exit code: 0 if the agent finished or used up its turns, 1 if it failed. The last line says which.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig, MCPServerConfig
from harbor.models.trial.paths import TrialPaths

_SECRETS = ("OPENAI_API_KEY",)


class LocalEnvironment(BaseEnvironment):
    """A harbor environment without a container: commands and files are those of the machine that runs this script."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        pass  # no image to build

    async def start(self, force_build: bool) -> None:
        del force_build

    async def stop(self, delete: bool) -> None:
        del delete

    async def upload_file(self, source_path, target_path) -> None:
        shutil.copyfile(source_path, target_path)

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    download_file = upload_file
    download_dir = upload_dir

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        del user  # there is only one user
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd, env={**environment, **(env or {})}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return ExecResult(stdout="", stderr=f"timed out after {timeout_sec} s", return_code=124)
        code = process.returncode
        return ExecResult(stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=code)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-base", required=True)
    parser.add_argument("--max-turns", type=int)
    parser.add_argument("--request-timeout", type=float, default=300.0)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--skills-dir")
    parser.add_argument("--mcp", type=json.loads, default=[])
    parser.add_argument("--responses", action="store_true")
    parser.add_argument("--rollout-details", action="store_true")
    parser.add_argument("--session-id")
    parser.add_argument("instruction")
    return parser.parse_args()


async def run_agent(options: argparse.Namespace) -> int:
    if shutil.which("tmux") is None:
        print("tmux is not installed; terminus-2 types into a tmux terminal (apt install tmux)", file=sys.stderr)
        return 1
    options.logs.mkdir(parents=True, exist_ok=True)
    # Its own socket: two agents on one machine would otherwise share a tmux server and its session.
    os.environ["TMUX_TMPDIR"] = str(options.logs)
    environment = LocalEnvironment(
        environment_dir=options.logs,
        environment_name="local",
        session_id=options.session_id or "local",
        trial_paths=TrialPaths(trial_dir=options.logs),
        task_env_config=EnvironmentConfig(),
    )
    agent = Terminus2(
        logs_dir=options.logs,
        model_name=options.model,
        api_base=options.api_base,
        max_turns=options.max_turns,
        suppress_max_turns_warning=True,
        collect_rollout_details=options.rollout_details,
        session_id=options.session_id,
        session_id_headers=["X-Session-ID"] if options.session_id else None,
        use_responses_api=options.responses,
        # Otherwise it downloads asciinema to record the terminal.
        record_terminal_session=False,
        llm_call_kwargs={"timeout": options.request_timeout},
        mcp_servers=[MCPServerConfig.model_validate(server) for server in options.mcp],
        skills_dir=options.skills_dir,
    )
    context = AgentContext()
    try:
        await agent.setup(environment)
        await agent.run(options.instruction, environment, context)
    finally:
        await environment.exec("tmux kill-server")
        (options.logs / "context.json").write_text(context.model_dump_json(indent=1))
    turns = (context.metadata or {}).get("n_episodes")
    complete = _declared_complete(options.logs / "trajectory.json")
    print(f"terminus-2 ended after {turns} turns: {'task complete' if complete else 'out of turns'}")
    return 0


def _declared_complete(trajectory: Path) -> bool:
    """Return whether the last two steps both declared the task complete, as a finished run does."""
    steps = [step for step in json.loads(trajectory.read_text())["steps"] if step["source"] == "agent"]
    declared = [
        any(call["function_name"] == "mark_task_complete" for call in step.get("tool_calls") or []) for step in steps
    ]
    return len(declared) >= 2 and declared[-1] and declared[-2]


def main() -> int:
    try:
        return asyncio.run(run_agent(parse_arguments()))
    except Exception as error:  # noqa: BLE001  the adapter reads the last line
        print(f"terminus-2 failed: {type(error).__name__}: {str(error)[:1000]}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
