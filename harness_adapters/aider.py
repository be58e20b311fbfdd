"""aider (https://aider.chat): has no tools and runs no commands. The model writes each edit as a block of text in its
answer, and aider changes the file.

aider uses litellm, streams its main calls, and makes one more call for a commit message after each edit.
"""

from __future__ import annotations

import re

from harness_adapters.base import (
    Connection,
    Endpoint,
    ExitOutcome,
    HarnessInfo,
    Installation,
    LaunchContext,
    LaunchPlan,
    WireApi,
)
from harness_adapters.toolkit.adapter import make_launch_plan
from harness_adapters.toolkit.python_venv import LITELLM_ENV, LITELLM_UNSET, VenvHarness

# What aider prints after a request has failed for good, and before it retries one.
_FAILED = re.compile(r"^litellm\.\w+: .*|^Model .* has hit a token limit!$", re.MULTILINE)
_RETRIED = re.compile(r"^Retrying in [\d.]+ seconds\.\.\.$", re.MULTILINE)
# Once a day it reads a list of prices and limits, from this file or from the internet.
_PRICES = ".aider/caches/model_prices_and_context_window.json"


class Aider(VenvHarness):
    name = "aider"
    default_version = "0.86.2"
    info = HarnessInfo(
        homepage="https://aider.chat",
        package="pypi:aider-chat",
        wire_apis=("openai_chat",),
        runtime="python 3.10 to 3.12",
        features=frozenset({"stream", "resume"}),
        notes="Exits with 0 even when it fails, so the adapter reads its output. For each instruction it makes one "
        "model call, edits the files and commits. Runs no commands, and reads only files that the answer names.",
        needs=("git",),
        version_command=("{program}", "-m", "aider", "--version"),
        summary="Pair programming in the terminal; edits by text blocks, without tools",
        command="aider",
    )
    imports = "litellm, aider.main, aider.coders"
    pythons = ("3.12", "3.11", "3.10")

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        return Connection(
            env={"OPENAI_API_BASE": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key},
            arguments=(
                *("--model", f"openai/{endpoint.model}", "--no-show-model-warnings"),
                *("--timeout", f"{endpoint.request_timeout_seconds:g}"),
            ),
            unset=LITELLM_UNSET,
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        argv = [str(installed.program), "-m", "aider", *connection.arguments]
        argv += ["--yes-always", "--no-check-update", "--analytics-disable"]
        argv += ["--no-show-release-notes", "--no-gitignore", "--no-pretty", "--no-fancy-input", "--no-detect-urls"]
        # In HOME and not in the workspace, whose files become part of the patch.
        argv += ["--chat-history-file", f"{context.home}/chat.md", "--input-history-file", f"{context.home}/input.txt"]
        argv += ["--restore-chat-history"] if context.resume else []
        argv += [f"--message={context.instruction}"]  # one word, because it may begin with a dash
        env = {"GIT_TERMINAL_PROMPT": "0", **LITELLM_ENV}
        # It caches a map of the repository at the root of the workspace; that path cannot be changed.
        files = {".config/git/ignore": ".aider*\n", _PRICES: '{"none": {}}\n'}
        return make_launch_plan(connection, argv, env=env, files=files)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        if exit_code != 0:
            return super().interpret(exit_code, stdout_tail)
        failed = list(_FAILED.finditer(stdout_tail))
        if failed and not _RETRIED.search(stdout_tail, failed[-1].end()):
            return "failed", f"aider gave up: {failed[-1][0][:400]}"
        return "ok", "answered"
