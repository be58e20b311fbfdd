"""aider (https://aider.chat): edits files by blocks of text in the answer; it has no tools and runs no commands.

It asks through litellm, streams its main calls, and asks once more for a commit message after each edit.
"""

from __future__ import annotations

import re

from harness_adapters.base import ExitOutcome, HarnessInfo, Installation, LaunchContext, LaunchPlan, require_supported
from harness_adapters.toolkit import litellm
from harness_adapters.toolkit.python_venv import VenvHarness

# How it tells of a request that failed for good; between two tries it says in how many seconds it retries.
_FAILED = re.compile(r"^litellm\.\w+: .*|^Model .* has hit a token limit!$", re.MULTILINE)
_RETRIED = re.compile(r"^Retrying in [\d.]+ seconds\.\.\.$", re.MULTILINE)
# It looks up a list of prices and limits once a day, here or on the internet.
_PRICES = ".aider/caches/model_prices_and_context_window.json"


class Aider(VenvHarness):
    """Adapter of aider."""

    name = "aider"
    default_version = "0.86.2"
    facts = HarnessInfo(
        homepage="https://aider.chat",
        package="pypi:aider-chat",
        tested_versions=("0.86.2", "0.86.2"),
        wire_apis=("openai_chat",),
        runtime="python 3.10 to 3.12",
        features=frozenset({"stream", "resume"}),
        notes="Exits with 0 when it fails as well; the adapter reads its output. It asks once for each instruction, "
        "edits and commits; it runs no commands by itself and looks only at files that the answer names.",
        needs=("git",),
        version_command=("{program}", "-m", "aider", "--version"),
    )
    imports = "litellm, aider.main, aider.coders"
    pythons = ("3.12", "3.11", "3.10")

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        require_supported(self.name, self.facts, context)
        argv = [str(installed.program), "-m", "aider", "--model", f"openai/{context.model}"]
        argv += ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
        argv += ["--no-show-release-notes", "--no-gitignore", "--no-pretty", "--no-fancy-input", "--no-detect-urls"]
        argv += ["--timeout", f"{context.request_timeout_seconds:g}"]
        # Beside the workspace, not in it: what lies there becomes part of the patch.
        argv += ["--chat-history-file", f"{context.home}/chat.md", "--input-history-file", f"{context.home}/input.txt"]
        if context.resume:
            argv += ["--restore-chat-history"]
        argv += [f"--message={context.instruction}"]  # in one word: it may begin with a dash
        env = {
            "HOME": context.home,
            "OPENAI_API_BASE": context.base_url,
            "OPENAI_API_KEY": context.api_key,
            "GIT_TERMINAL_PROMPT": "0",
            **litellm.LITELLM_ENV,
        }
        # Its map of the repository is cached at the root of the workspace, which cannot be set.
        files = {".config/git/ignore": ".aider*\n", _PRICES: '{"none": {}}\n'}
        return LaunchPlan(argv=tuple(argv), env=env, files=files, mounts=installed.mounts)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        if exit_code is None:
            return "timed_out", "aider was stopped by the clock"
        if exit_code != 0:
            lines = [line.strip() for line in stdout_tail.splitlines() if line.strip()]
            return "failed", f"aider exited with {exit_code}: {lines[-1][:400] if lines else 'no output'}"
        failed = list(_FAILED.finditer(stdout_tail))
        if failed and not _RETRIED.search(stdout_tail, failed[-1].end()):
            return "failed", f"aider gave up: {failed[-1][0][:400]}"
        return "ok", "answered"
