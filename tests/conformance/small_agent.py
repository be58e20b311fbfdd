"""A harness that passes the conformance checks, and variants that each do one thing wrong.

This file is the adapter and also the program that it launches (standard library only).
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class SmallAgent:
    """Passes every check."""

    name = "small-agent"
    default_version = "1"
    manner = "well"

    @property
    def info(self):  # type: ignore[no-untyped-def]
        from harness_adapters.base import HarnessInfo  # not available where the agent program itself runs

        features = frozenset({"resume", "parallel_tools", "reasoning"})
        return HarnessInfo("https://example.org", "none", ("openai_chat",), "python 3", features)

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

        env = {"BASE_URL": context.base_url, "API_KEY": context.api_key, "TASK": context.instruction}
        env |= {"HOME": context.home, "MANNER": self.manner, "RESUME": "1" if context.resume else ""}
        # Names the test that the process belongs to, so that stray processes can be found.
        env["TEST_HOME"] = os.environ.get("POLAR_HOME", "")
        return LaunchPlan((str(installed.program), str(Path(__file__).resolve())), env)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[str, str]:
        if exit_code is None:
            return "timed_out", "reached its time limit"
        return ("ok", "finished") if exit_code == 0 else ("failed", f"exited with {exit_code}")


class ForgetfulAgent(SmallAgent):
    """Runs commands, but sends back neither their output nor the reasoning."""

    manner = "forgetful"


class LyingAgent(SmallAgent):
    """Exits with 0 whatever happened."""

    manner = "lying"


class RewritingAgent(SmallAgent):
    """Changes its earlier messages in every request."""

    manner = "rewriting"


class ReserialisingAgent(SmallAgent):
    """Parses and prints the arguments of every call before it sends them back, as many programs do."""

    manner = "reserialising"


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer, after up to five attempts with the header that SDKs mark retries with."""
    body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
    headers = {"authorization": "Bearer " + os.environ["API_KEY"], "content-type": "application/json"}
    for attempt in range(5):
        again = {"x-stainless-retry-count": str(attempt)}
        request = urllib.request.Request(os.environ["BASE_URL"] + "/chat/completions", body, headers | again)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(json.load(answer)["choices"][0]["message"])
        except urllib.error.HTTPError as error:
            if error.code < 429:
                raise
        except (OSError, http.client.HTTPException, ValueError):
            pass
        time.sleep(0.1)
    raise OSError("no answer after five attempts")


def main() -> int:
    manner = os.environ["MANNER"]
    history = Path(os.environ["HOME"]) / "conversation.json"
    messages = json.loads(history.read_text()) if os.environ["RESUME"] else [{"role": "system", "content": "Help."}]
    messages.append({"role": "user", "content": os.environ["TASK"]})
    while True:
        if manner == "rewriting":
            messages[0]["content"] = f"Help, {len(messages)} times."
            messages[1]["content"] += " Please."
            for message in messages:
                message.update({"content": str(message["content"]) + "."} if message["role"] == "assistant" else {})
        answer = ask(messages)
        if manner == "forgetful":
            answer.pop("reasoning_content", None)
            answer.pop("reasoning", None)
        for call in answer.get("tool_calls") or () if manner == "reserialising" else ():
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        messages.append(answer)
        history.write_text(json.dumps(messages))
        if not answer.get("tool_calls"):
            return 0
        for call in answer["tool_calls"]:
            command = json.loads(call["function"]["arguments"]).get("command", "echo no command; false")
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            output = "" if manner == "forgetful" else done.stdout
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as failure:
        print(failure)
        sys.exit(0 if os.environ["MANNER"] == "lying" else 1)
