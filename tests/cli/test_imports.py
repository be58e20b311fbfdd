"""A verb imports only the modules that it needs, because imports take most of the time of a short command."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import typer
from typer.main import solve_typer_info_help

from polar_proxy.cli.app import VERBS
from polar_proxy.cli.traces import NO_ROWS
from tests.cli.process import environment
from tests.cli.runner import polar_json, polar_ok
from tests.cli.test_show import save
from tests.export.dialect_requests import recorded

MODELS = {"torch", "transformers", "tokenizers", "safetensors", "peft", "ray", "matplotlib"}
SERVER = {"fastapi", "starlette", "uvicorn", "prometheus_client", "httptools", "polar_proxy.gateway", "polar_proxy.api"}
AGENTS = {"harness_adapters", "sandboxes", "polar_proxy.rollouts", "polar_proxy.engines"}
STORE = {"sqlalchemy", "polar_proxy.store"}
CLIENT = {"httpx", "polar_proxy.client"}
TOKENS = {"numpy", "zstandard", "polar_proxy.sequences"}
SETTINGS = {"pydantic", "pydantic_settings", "polar_proxy.config"}
SERVICE = {
    "polar_proxy.store.service",
    "polar_proxy.store.repositories.training",
    "polar_proxy.store.repositories.conversations",
}
ASYNC_SQL = {"sqlalchemy.ext.asyncio", "sqlalchemy.orm", "aiosqlite"}
RARE = {"alembic", "sqlalchemy.dialects.postgresql", "polar_proxy.training.metrics"}
READING = MODELS | SERVER | AGENTS | CLIENT | ASYNC_SQL | RARE
"""Modules that a verb which reads the database does not need."""
EXPORTS = {"polar_proxy.export.exporter", "polar_proxy.traces.builders", "polar_proxy.training"}
TRAINERS = {f"polar_proxy.export.formats.{name}" for name in ("nemo_rl", "slime", "tinker", "trl", "verl")}
OTHER_DIALECTS = {f"polar_proxy.dialects.{name}.dialect" for name in ("anthropic", "google", "openai_responses")}

PROGRAM = """
import json, sys
from polar_proxy.cli import main

for command in json.loads(sys.argv.pop()):
    sys.argv = ["polar", *command]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    print("\\nimported", code, *sys.modules)
"""


def run_in_one_process(commands: Sequence[Sequence[str]], setup: str = "", **env: str) -> CompletedProcess[str]:
    """Run commands one after the other, and print after each its exit code and all modules imported by then."""
    program = [sys.executable, "-c", setup + PROGRAM, json.dumps(commands)]
    return subprocess.run(program, env={**environment(), **env}, capture_output=True, text=True)


def check_imports(expected: Sequence[tuple[Sequence[str], set[str]]]) -> None:
    """Check the modules that are imported by the end of each command against those that it must not import.

    The commands run in the given order, so that those which may import more come later.
    """
    done = run_in_one_process([command for command, _ in expected])
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert len(found) == len(expected), done.stderr
    for (command, forbidden), (code, *modules) in zip(expected, found, strict=True):
        assert int(code) in (0, NO_ROWS), done.stderr
        assert set(modules) & forbidden == set(), command


@pytest.mark.slow
def test_a_verb_imports_only_what_it_needs() -> None:
    common = MODELS | SERVER | STORE | CLIENT | TOKENS
    check_imports(
        [
            (["--version"], common | AGENTS | SETTINGS | {"rich", "asyncio"}),
            (["--help"], common | AGENTS | SETTINGS | {"asyncio"}),
            (["serve", "--help"], common | AGENTS),
            (["run", "--help"], common | AGENTS),
            (["harness", "list"], common),
            (["connect"], common),
        ]
    )


@pytest.mark.slow
def test_a_verb_that_reads_no_tokens_imports_only_what_it_needs() -> None:
    job = polar_json("submit", "swe-task")["job_id"]
    (rollout,) = polar_json("results", job)["rollouts"]
    polar_json("cancel", rollout["rollout_id"])  # ends the job, so that its events end
    reading = READING | TOKENS | EXPORTS | {"polar_proxy.dialects"}
    check_imports(
        [
            (["sessions"], reading | SERVICE),
            (["key", "list"], reading | SERVICE),
            (["db", "path"], reading | SERVICE),
            (["sql", "SELECT 1"], reading | SERVICE),
            (["train", "list"], reading),
            (["service", "status"], reading),
            (["top"], reading),
            (["status"], reading),
            (["status", job], reading),
            (["results", job], reading),
            (["events", job], reading),
            (["watch", job], reading),
        ]
    )


@pytest.mark.slow
def test_a_verb_that_reads_tokens_imports_only_what_it_needs() -> None:
    session = polar_json("session", "new")["session_id"]
    check_imports(
        [
            (["show", session], READING | EXPORTS),
            (["export"], READING | TRAINERS),
            (["db", "stats"], READING - ASYNC_SQL | {"polar_proxy.store.service"}),
        ]
    )


@pytest.mark.slow
def test_showing_and_exporting_a_call_import_only_what_it_needs(polar_home: Path) -> None:
    call = asyncio.run(save(polar_home, recorded("openai_chat")))
    export = ["export", "--format", "tokens-jsonl"]
    check_imports([(export, READING | TRAINERS | {"polar_proxy.dialects", "polar_proxy.api_models"})])
    session = polar_json("show", call)["session_id"]
    check_imports([(["show", name], READING | OTHER_DIALECTS | EXPORTS) for name in (session, call)])


@pytest.mark.slow
def test_a_remote_verb_imports_neither_store_nor_server() -> None:
    """The server does not answer; the verb's imports are the same as if it did."""
    impatient = "import polar_proxy.client.requests as r; r.MAX_PAUSE_SECONDS = 0.01\n"
    done = run_in_one_process([["status"]], impatient, POLAR_URL="http://127.0.0.1:9", POLAR_API_KEY="none")
    assert "Is `polar serve` running there" in done.stderr
    assert set(done.stdout.splitlines()[-1].split()) & (MODELS | SERVER | STORE | {"numpy", "alembic"}) == set()


COLLECTIONS = """
import atexit, gc, sys, time
import polar_proxy.cli.common as common
from polar_proxy.cli import main
common._SHORT_COMMAND_SECONDS = 60.0  # on a busy machine the command takes longer than a second
before = sum(generation["collections"] for generation in gc.get_stats())
try:
    main()
finally:
    print("\\n", sum(generation["collections"] for generation in gc.get_stats()) - before)
    atexit._run_exitfuncs()
    print(gc.get_freeze_count())
"""


@pytest.mark.slow
def test_a_short_command_collects_no_garbage() -> None:
    polar_ok("db", "upgrade")
    command = [sys.executable, "-c", COLLECTIONS, "sessions"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    *_, collections, frozen = done.stdout.splitlines()
    assert int(collections) == 0, done.stderr
    assert int(frozen) > 0, "the last collection has nothing to examine"


THREADS = """
import os
from polar_proxy.cli import main
try:
    main()
finally:
    import numpy
    print("\\n", len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
def test_a_short_command_starts_no_threads_for_linear_algebra() -> None:
    polar_ok("db", "upgrade")
    env = {name: value for name, value in environment().items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", THREADS, "sessions"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "1", done.stderr


@pytest.mark.parametrize("name", VERBS)
def test_listed_help_of_a_verb_is_its_first_paragraph(name: str) -> None:
    loaded = VERBS[name].load()
    if isinstance(loaded, typer.Typer):
        text = solve_typer_info_help(typer.models.TyperInfo(loaded))
    else:
        text = inspect.cleandoc(loaded.__doc__ or "")
    assert VERBS[name].help == " ".join(text.split("\n\n")[0].split())
