"""A real `polar serve` with rollout workers in its own process: a small agent, process sandboxes, a scripted policy."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from tests.cli.process import POLAR, environment
from tests.fakes.tiny_agent import TINY_AGENTS

ENGINE = "tests.fakes.player:PlayerEngine"


@dataclass(frozen=True)
class PolarServer:
    url: str
    key: str
    """An admin key."""
    home: Path
    process: subprocess.Popen[str]


@contextlib.contextmanager
def polar_serve(home: Path, *arguments: str, workers: bool = True) -> Iterator[PolarServer]:
    """`home`: the folder that POLAR_HOME and POLAR_DB name already."""
    env = environment() | {"POLAR_RUN__HARNESS": "tests.fakes.tiny_agent:TinyAgent", "POLAR_RUN__SANDBOX": "process"}
    env["POLAR_ALLOWED_CODE"] = json.dumps(sorted(TINY_AGENTS))
    env["POLAR_API__FOLDERS"] = json.dumps([tempfile.gettempdir()])  # where tests keep their files
    command = [POLAR, "serve", "--engine", ENGINE, "--port", "0", "--json", *arguments]
    if workers:
        command += ["--rollout-workers", "2"]
    home.mkdir(parents=True, exist_ok=True)
    log = home / "serve.log"
    with (
        log.open("ab") as errors,
        subprocess.Popen(command, env=env, cwd=home, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            printed = ""
            while not printed.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, f"polar serve ended before it was ready: {log.read_text()}"
                printed += line
            yield PolarServer(orjson.loads(printed)["url"], (home / "api-key").read_text().strip(), home, process)
        finally:
            process.terminate()
            try:
                process.wait(120)
            finally:
                process.kill()
