"""A small harness for quick tests: an adapter, and the agent program that it launches (standard library only).

Its requests look like those of mini-swe-agent (same text around the task, one bash tool, observations as JSON), so that
the scripted expert can solve them. Its subclasses each do one thing wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class TinyAgent:
    """`--harness tests.fakes.tiny_agent:TinyAgent`"""

    name = "tiny-agent"
    default_version = "1"
    manner = "well"

    @property
    def info(self):  # type: ignore[no-untyped-def]
        from harness_adapters.base import HarnessInfo  # not available where the agent program itself runs

        return HarnessInfo("https://example.org", "none", ("openai_chat",), "python 3", frozenset())

    def install(self, cache_root: Path, version: str | None = None):  # type: ignore[no-untyped-def]
        from harness_adapters.base import Installation

        python = Path(sys.base_prefix) / "bin" / "python3"
        here = Path(__file__).resolve()
        mounts = tuple(path for path in (Path(sys.base_prefix), here.parent) if not path.is_relative_to("/usr"))
        return Installation(self.name, self.default_version, here.parent, python, mounts)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return True

    def launch(self, installed, context):  # type: ignore[no-untyped-def]
        from harness_adapters.base import LaunchPlan

        env = {"BASE_URL": context.base_url, "API_KEY": context.api_key, "MODEL": context.model}
        # Names the test that the process belongs to, so that stray processes can be found.
        env |= {"TASK": context.instruction, "MANNER": self.manner, "TEST_HOME": os.environ.get("POLAR_HOME", "")}
        return LaunchPlan((str(installed.program), str(Path(__file__).resolve())), env)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[str, str]:
        if exit_code is None:
            return "timed_out", "reached its time limit"
        return ("ok", "submitted") if exit_code == 0 else ("failed", f"tiny-agent exited with {exit_code}")


class SleepyAgent(TinyAgent):
    """Runs its first command, starts a background process, makes a file `asleep` in its home, and sleeps."""

    manner = "sleepy"


class HeldAgent(TinyAgent):
    """Runs its first command, and waits for a file `go` in the home of its test."""

    manner = "held"


class CrashingAgent(TinyAgent):
    manner = "crashing"


class BriefAgent(TinyAgent):
    """Makes one request and exits with 0, whatever the answer."""

    manner = "brief"


class FourCallsAgent(TinyAgent):
    """Makes at most four requests and exits with 0, whatever the answers."""

    manner = "four calls"


class VandalAgent(TinyAgent):
    """Destroys the repository and leaves 3,000 nested folders before it ends."""

    manner = "vandal"


class CheatingAgent(TinyAgent):
    """Replaces every test by one that always passes, with a conftest and sitecustomize to help them."""

    manner = "cheating"


class SuspiciousAgent(TinyAgent):
    """Solves the task, and leaves a conftest without effect: a sign of reward hacking."""

    manner = "suspicious"


class FillingAgent(TinyAgent):
    """Fills its home before it begins to work."""

    manner = "filling"


class HoardingAgent(TinyAgent):
    """Solves the task, then fills its workspace."""

    manner = "hoarding"


class HostileAgent(TinyAgent):
    """Solves the task, and writes `HOSTILE` to its output, its conversation, and the name and text of a file."""

    manner = "hostile"


TINY_AGENTS = frozenset(f"{__name__}:{agent.__name__}" for agent in (TinyAgent, *TinyAgent.__subclasses__()))
"""The names of these agents, for the setting `allowed_code`."""

MOST_CALLS = {"brief": 1, "four calls": 4}
"""Manner -> number of requests after which the agent ends as if it had finished."""

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "'\"></pre></code>{{7*7}}{% raw %}\x1b[31mred\x1b[0m\u202egnihton\u202c"
)
"""A text that takes effect where it is not escaped: it runs a script, closes its HTML element, fills in a template,
colours a terminal or reorders characters."""


def main() -> int:
    env = os.environ
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"Please solve this issue: {env['TASK']}\n\nYou can execute bash commands."},
    ]
    if env["MANNER"] == "hostile":
        messages[0]["content"] += HOSTILE
    if env["MANNER"] == "filling":
        fill(Path(env["HOME"]))
    for number in range(1, 16):
        body = json.dumps({"model": env["MODEL"], "messages": messages, "tools": [TOOL]}).encode()
        request = urllib.request.Request(
            env["BASE_URL"] + "/chat/completions",
            body,
            {"authorization": "Bearer " + env["API_KEY"], "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        print(json.dumps(message), flush=True)
        if number == MOST_CALLS.get(env["MANNER"]):
            return 0
        for call in message.get("tool_calls") or []:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            output = done.stdout + done.stderr
            if output.startswith("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"):
                return misbehave(env["MANNER"])
            observation = json.dumps({"returncode": done.returncode, "output": output})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": observation})
        if env["MANNER"] == "sleepy":
            subprocess.Popen(["sleep", "1234.5"])
            Path(env["HOME"], "asleep").touch()
            time.sleep(600)
        while env["MANNER"] == "held" and not Path(env["TEST_HOME"], "go").exists():
            time.sleep(0.05)
        if env["MANNER"] == "crashing":
            return 3
    return 4


def misbehave(manner: str) -> int:
    if manner == "vandal":
        subprocess.run(["rm", "-rf", ".git"], check=True)
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
    if manner == "cheating":
        subprocess.run(["git", "checkout", "-q", "."], check=True)
        good = "import unittest\n\nclass T(unittest.TestCase):\n    def test_it(self):\n        pass\n"
        for path in Path("tests").rglob("test_*.py"):
            path.write_text(good)
        Path("sitecustomize.py").write_text("print('always ok')\n")
    if manner == "suspicious":
        Path("conftest.py").write_text("# nothing\n")
    if manner == "hostile":
        print(HOSTILE, flush=True)
        Path(HOSTILE.replace("/", "")).write_text(HOSTILE)
    if manner == "hoarding":
        fill(Path())
    return 0


def fill(folder: Path) -> None:
    """Write until the disk is full. If no write fails, because a watcher enforces the quota, wait for the watcher."""
    for number in range(20):
        try:
            (folder / f"filling-{number}").write_bytes(bytes(8 << 20))
        except OSError as error:
            print("cannot write:", error, flush=True)
            return
    time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
