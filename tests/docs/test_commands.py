"""Every shell command of the documentation runs as it is printed.

Placeholders are replaced by the ids of a recorded run, and addresses of servers by those that the test starts.
`RUN_ELSEWHERE` names the commands that need another program, and the test that runs each of them; `RUN_BY_HAND` those
that no test runs, and why. tests/docs/test_quick_commands.py runs the ones that are quick in `make test`, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from polar_proxy.intercept.certificates import CertificateAuthority, open_authority
from tests.docs.blocks import COMMANDS, ROOT, DocumentedCommand, is_script, of_language
from tests.docs.tls import tls_in_front_of
from tests.fakes.llama_server import FakeLlama
from tests.fakes.vllm_server import FakeVllm

BIN = Path(sys.executable).parent
ENGINE_URL = "http://127.0.0.1:8000"
LLAMA_URL = "http://127.0.0.1:8080"
HOSTED_URL = "https://api.example.com"
SECURE_URL = "https://polar.example.org"
MODEL = "my-model"
Fake = TypeVar("Fake", FakeVllm, FakeLlama)

RUN_ELSEWHERE = {
    "make ": ".ci/run",
    "polar run swe-task --harness acp:": "tests/rollouts/test_dialogue.py",
    "polar run swe-task --harness codex": "tests/harness_adapters/test_npm_real.py",
    "polar run swe-task --sandbox docker": "tests/rollouts/test_run.py",
    "polar doctor drift --harness codex": "tests/cli/test_doctor.py",
    "polar serve --engine anthropic": "tests/hosted/test_cli.py",
    "polar serve --engine google": "tests/hosted/test_cli.py",
    "polar serve --engine openai": "tests/hosted/test_cli.py",
    "llama-server ": "tests/engines/test_llamacpp_real.py",
    "ray start": "tests/rollouts/cluster/test_cluster.py",
    "polar node": "tests/rollouts/cluster/test_cluster.py",
    "polar serve --executor ray": "tests/rollouts/cluster/test_cluster.py",
    "polar db stats --db postgresql:": "tests/store/test_schema.py",
    "CUDA_VISIBLE_DEVICES=": "tests/training/test_nccl.py",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=": "tests/training/test_weight_sync_vllm.py",
    "polar audit ": "tests/cli/test_traces.py",
    "polar export --format tokens-jsonl --builder rescored": "tests/cli/test_traces.py",
    "polar train grpo --engine vllm": "tests/training/test_weight_sync_vllm.py",
    "polar train grpo --feed": "tests/training/test_http_feed.py",
    "polar train adapter": "tests/training/test_lora.py",
    "python examples/trainer_over_http/train.py": "tests/training/test_http_feed.py",
    "polar intercept -- codex": "tests/intercept/test_real_agents.py",
    "polar intercept --others list": "tests/intercept/test_cli.py",
    "polar run swe-task --intercept": "tests/intercept/test_rollouts.py",
    "export ": "tests/docs/test_quick_commands.py",
    "sqlite3 ": "tests/deploy/test_backup.py",
    "cp -a ": "tests/deploy/test_backup.py",
    "pg_dump ": "tests/deploy/test_backup.py",
    "createdb ": "tests/deploy/test_backup.py",
    "pg_restore ": "tests/deploy/test_backup.py",
    "docker build -t polar": "tests/test_image.py",
}
RUN_BY_HAND = {
    "sudo ": "changes the machine; tests/deploy checks the unit",
    "POLAR_DB_PASSWORD=": "pulls images; tests/deploy checks the file",
    "kubectl ": "needs a cluster; tests/deploy checks the manifest",
    "python benchmarks/": "a campaign takes hours",
    "examples/tiny_policy/make.sh": "records and trains for an hour",
    "PYTHONPATH=. python -m examples.tiny_policy.evaluate": "needs the result of make.sh, and plays for minutes",
}
"""Reason by the beginning of the command."""


def run_by(command: DocumentedCommand) -> str | None:
    """Return the test that runs a command, if it is not this one."""
    return next((test for start, test in RUN_ELSEWHERE.items() if command.text.startswith(start)), None)


def by_hand(command: DocumentedCommand) -> bool:
    return run_by(command) is None and command.text.startswith(tuple(RUN_BY_HAND))


HERE = [command for command in COMMANDS if run_by(command) is None and not by_hand(command)]


def in_thread(fake: Fake) -> Iterator[Fake]:
    """Run a fake server in a thread, because the commands are blocking processes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result(60)
    yield fake
    asyncio.run_coroutine_threadsafe(fake.__aexit__(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


@pytest.fixture(scope="module")
def fake_vllm() -> Iterator[FakeVllm]:
    yield from in_thread(FakeVllm(model=MODEL, context_length=100_000))


@pytest.fixture(scope="module")
def fake_llama() -> Iterator[FakeLlama]:
    yield from in_thread(FakeLlama(context_length=100_000))


@dataclass(frozen=True)
class Workspace:
    """A folder and a home in which commands run, with a recorded job, session, call and training run."""

    folder: Path
    env: dict[str, str]
    ids: dict[str, str]

    def shell(self, text: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def json(self, text: str) -> dict[str, object]:
        done = self.shell(text)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    @contextmanager
    def server(self, command: str) -> Iterator[str]:
        """Run a `polar serve` command until the block ends, and yield its URL."""
        log = self.folder / "server.log"  # not a pipe, which a server fills that writes a line for each session
        with log.open("w") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port 0 --json"],
                cwd=self.folder,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            assert process.stdout is not None
            ready = ""
            while not ready.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, log.read_text()
                ready += line
            yield json.loads(ready)["url"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(120) in (0, 128 + signal.SIGINT)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, fake_vllm: FakeVllm) -> Workspace:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(BIN.parent)
    agents = tmp_path_factory.mktemp("agents")
    for name in ("claude", "codex"):  # fakes of the agents that `polar connect` starts
        (agents / name).symlink_to(shutil.which("true") or "/bin/true")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("POLAR_")},
        "HOME": str(home),
        "PATH": f"{agents}:{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "POLAR_RUN__HARNESS": "tests.fakes.tiny_agent:TinyAgent",
        "POLAR_RUN__SANDBOX": "process",
        "POLAR_ENGINE__KIND": "tests.fakes.player:PlayerEngine",
        "POLAR_HARNESSES": os.environ.get("POLAR_CACHE_DIR", str(home / "harnesses")),
    }
    space = Workspace(folder, env, {})
    run = space.json("polar run swe-task --samples 2 --json")
    rollout = run["rollouts"][0]  # type: ignore[index]
    job = space.json(f"polar show {rollout['rollout_id']} --json")["job_id"]
    shown = space.json(f"polar show {rollout['session_id']} --json")
    space.ids.update(JOB=str(job), SESSION=str(rollout["session_id"]), CALL=str(shown["calls"][0]["call_id"]))  # type: ignore[index]
    shutil.copy(folder / "polar.db", folder / "runs.db") if (folder / "polar.db").exists() else None
    return space


def as_run(command: str, workspace: Workspace, fake_vllm: FakeVllm, fake_llama: FakeLlama) -> str:
    """Return the command with this test's ids and servers in place of the documented ones."""
    text = (
        command.replace(ENGINE_URL, fake_vllm.url)
        .replace(LLAMA_URL, fake_llama.url)
        .replace(HOSTED_URL, fake_vllm.url)
        .replace("--db runs.db", "--db ~/.polar/polar.db")
    )
    if command.startswith("polar cancel"):  # a job that has ended cannot be cancelled
        text = text.replace("JOB", workspace.shell("polar submit swe-task").stdout.strip())
    for name, value in workspace.ids.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


async def run_over_tls(
    workspace: Workspace, text: str, url: str, authority: CertificateAuthority
) -> subprocess.CompletedProcess[str]:
    """Run a command that names `SECURE_URL`, with TLS in front of the server at `url`."""
    async with tls_in_front_of(url, authority) as secure:
        trusting = f"export SSL_CERT_FILE={authority.bundle}; {text.replace(SECURE_URL, secure)}"
        return await asyncio.to_thread(workspace.shell, trusting)


@pytest.mark.full
@pytest.mark.parametrize("command", HERE, ids=str)
def test_command_runs(
    command: DocumentedCommand, workspace: Workspace, fake_vllm: FakeVllm, fake_llama: FakeLlama
) -> None:
    text = as_run(command.text, workspace, fake_vllm, fake_llama)
    if text.startswith(("polar serve", "polar view")):
        with workspace.server(text.removesuffix(" &")) as url:
            assert url.startswith("http://")
        return
    if SECURE_URL in text:
        authority = open_authority(workspace.folder)
        with workspace.server("polar serve --require-known-keys") as url:
            done = asyncio.run(run_over_tls(workspace, text, url, authority))
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return
    if "polar connect" in text:
        with workspace.server("polar serve") as url:
            done = workspace.shell(f"export POLAR_URL={url}; {text}")
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return
    if "python-loop" in text:
        # The definition must not stay in the folder of installed harnesses, which other runs use.
        text = f"env -u POLAR_HARNESSES {text}"
    if text.startswith("polar train"):
        # An agent whose rollouts always end, and a database without the jobs that other commands queued.
        text = f"POLAR_RUN__HARNESS=tests.fakes.tiny_agent:BriefAgent POLAR_DB=train.db {text}"
    done = workspace.shell(text)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("start", RUN_ELSEWHERE)
def test_commands_run_elsewhere_are_documented_and_tested(start: str) -> None:
    assert [command for command in COMMANDS if command.text.startswith(start)] != []
    assert (ROOT / RUN_ELSEWHERE[start]).exists()


@pytest.mark.parametrize("start", RUN_BY_HAND)
def test_commands_run_by_hand_are_documented_and_name_existing_programs(start: str) -> None:
    commands = [command.text for command in COMMANDS if by_hand(command) and command.text.startswith(start)]
    assert commands != []
    for program in re.findall(r"(?:benchmarks|examples)/\S+\.(?:py|sh)", " ".join(commands)):
        assert (ROOT / program).exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in COMMANDS if one.text.startswith("python benchmarks/")], ids=str)
def test_a_benchmark_has_the_documented_options(command: DocumentedCommand) -> None:
    _, program, *options = shlex.split(command.text)
    done = subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {one for one in options if one.startswith("--")} <= set(re.findall(r"--[\w-]+", done.stdout))


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="apt-get install curl jq")
def test_http_examples(workspace: Workspace) -> None:
    page = "docs/guide/rollouts.md"
    (script,) = [block.text for block in of_language("sh") if block.page == page and is_script(block)]
    (python,) = [block.text for block in of_language("python") if block.page == page]
    # A database without the jobs that other commands queued.
    with workspace.server("env POLAR_DB=http.db polar serve --rollout-workers 2") as url:
        done = workspace.shell(script.replace("http://127.0.0.1:8399", url))
        assert done.returncode == 0, done.stderr
        assert re.search(r"^event: end$", done.stdout, re.M)
        key = (Path(workspace.env["HOME"]) / ".polar" / "api-key").read_text().strip()
        program = python.replace("http://127.0.0.1:8399", url)
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=workspace.env | {"POLAR_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert " end " in ran.stdout
