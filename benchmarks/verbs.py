"""Processor time of the commands that only read, on a database with one run of `make demo`.

    python benchmarks/verbs.py [--repeat 5] [--json]

Each command runs once before it is measured, so that Python's bytecode files exist.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_SECONDS = 0.6
POLAR = Path(sys.executable).with_name("polar")
COMMANDS = (
    *("--version", "--help", "connect", "harness list", "db path", "db stats", "key list", "train list"),
    *("service status", "top", "status", "status JOB", "results JOB", "watch JOB", "events JOB", "sessions"),
    *("show ROLLOUT", "show SESSION", "show CALL", "show CALL --tokens"),
    *("sql 'SELECT * FROM v_rollouts'", "sql 'SELECT * FROM v_messages'", "sql 'SELECT * FROM v_tokens LIMIT 20'"),
    *(
        "export",
        "export --format chat-jsonl",
        "export --format tokens-jsonl --where 'reward>=1'",
        "export --format trl",
    ),
)


def record_demo(env: dict[str, str]) -> dict[str, str]:
    """Run the demo, and return the ids that the commands name in capital letters."""

    def read(*arguments: str) -> dict[str, object]:
        done = subprocess.run([POLAR, *arguments, "--json"], env=env, stdout=subprocess.PIPE, check=True)
        return dict(json.loads(done.stdout))

    rollouts = read("run", "swe-task", "--samples", "4")["rollouts"]
    rollout = rollouts[0]  # type: ignore[index]
    record = read("show", rollout["rollout_id"])
    call = record["session"]["calls"][0]["call_id"]  # type: ignore[index]
    return {
        "ROLLOUT": rollout["rollout_id"],
        "SESSION": rollout["session_id"],
        "CALL": call,
        "JOB": str(record["job_id"]),
    }


def processor_seconds(command: list[str], env: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([POLAR, *command], env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(env: dict[str, str], repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each command, sorted. The commands take turns, so that other work slows all of them."""
    ids = record_demo(env)
    commands = {text: [ids.get(word, word) for word in shlex.split(text)] for text in COMMANDS}
    for command in commands.values():
        processor_seconds(command, env)
    rounds = [{text: processor_seconds(command, env) for text, command in commands.items()} for _ in range(repeat)]
    return {text: sorted(one[text] for one in rounds) for text in commands}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of measured rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        harnesses = os.environ.get("POLAR_HARNESSES") or str(Path("~/.polar/harnesses").expanduser())
        env = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env |= {"POLAR_HOME": home, "POLAR_HARNESSES": harnesses}
        seconds = measure(env, arguments.repeat)
    if arguments.json:
        print(json.dumps(seconds, indent=1))
    else:
        print("| command | processor time, s: least | median |\n|---|---|---|")
        for text, times in seconds.items():
            print(f"| `polar {text}` | {times[0]:.2f} | {statistics.median(times):.2f} |")
    return 1 if any(times[0] > LIMIT_SECONDS for times in seconds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
