"""A verb imports only the modules that it needs, because imports take most of the time of a short command."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path

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
READING = (
    MODELS | SERVER | AGENTS | CLIENT | {"alembic", "sqlalchemy.dialects.postgresql", "polar_proxy.training.metrics"}
)
"""Modules that a verb which reads the database does not need."""
TRAINERS = {f"polar_proxy.export.formats.{name}" for name in ("nemo_rl", "slime", "tinker", "trl", "verl")}
OTHER_DIALECTS = {f"polar_proxy.dialects.{name}.dialect" for name in ("anthropic", "google", "openai_responses")}

PROGRAM = """
import sys
from polar_proxy.cli import main
try:
    main()
finally:
    print("\\n" + " ".join(sys.modules))
"""


def imported(*arguments: str) -> set[str]:
    """Run a command in a process of its own, and return the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == (NO_ROWS if arguments[0] == "export" else 0), done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--version"], MODELS | SERVER | AGENTS | STORE | CLIENT | TOKENS | SETTINGS | {"rich", "asyncio"}),
        (["--help"], MODELS | SERVER | AGENTS | STORE | CLIENT | TOKENS | SETTINGS | {"asyncio"}),
        (["serve", "--help"], MODELS | SERVER | AGENTS | STORE | CLIENT | TOKENS),
        (["run", "--help"], MODELS | SERVER | AGENTS | STORE | CLIENT | TOKENS),
        (["harness", "list"], MODELS | SERVER | STORE | CLIENT | TOKENS),
        (["sessions"], READING | TOKENS | SERVICE),
        (["key", "list"], READING | TOKENS | SERVICE),
        (["db", "path"], READING | TOKENS | SERVICE),
        (["db", "stats"], READING | {"polar_proxy.store.service"}),
        (["export"], READING | {"polar_proxy.dialects"}),
        (["status"], READING),
        (["status", "JOB"], READING),
        (["results", "JOB"], READING),
        (["train", "list"], READING | TOKENS),
        (["service", "status"], READING | TOKENS),
        (["sql", "SELECT 1"], READING),
        (["top"], READING | TOKENS),
        (
            ["export", "--format", "tokens-jsonl"],
            READING | TRAINERS | {"polar_proxy.dialects", "polar_proxy.api_models"},
        ),
        (["connect"], MODELS | SERVER | STORE | CLIENT | TOKENS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "imports",
)
@pytest.mark.slow
def test_a_verb_imports_only_what_it_needs(arguments: list[str], forbidden: set[str]) -> None:
    job = polar_json("submit", "swe-task")["job_id"] if "JOB" in arguments else polar_ok("db", "upgrade")
    found = imported(*(job if one == "JOB" else one for one in arguments))
    assert found & forbidden == set()


COLLECTIONS = """
import gc, sys, time
import polar_proxy.cli.common as common
from polar_proxy.cli import main
common._SHORT_COMMAND_SECONDS = 60.0  # on a busy machine the command takes longer than a second
before = sum(generation["collections"] for generation in gc.get_stats())
try:
    main()
finally:
    print("\\n", sum(generation["collections"] for generation in gc.get_stats()) - before)
"""


@pytest.mark.slow
def test_a_short_command_collects_no_garbage() -> None:
    polar_ok("db", "upgrade")
    command = [sys.executable, "-c", COLLECTIONS, "sessions"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].strip() == "0", done.stderr


@pytest.mark.slow
def test_showing_a_session_starts_no_server_and_imports_the_dialects_of_its_calls_only(polar_home: Path) -> None:
    call_id = asyncio.run(save(polar_home, recorded("openai_chat")))
    for name in (call_id, polar_json("show", call_id)["session_id"]):
        assert imported("show", name) & (READING | OTHER_DIALECTS) == set()


@pytest.mark.slow
def test_a_remote_verb_imports_neither_store_nor_server() -> None:
    """The server does not answer; the verb's imports are the same as if it did."""
    program = "import polar_proxy.client.requests as r; r.MAX_PAUSE_SECONDS = 0.01\n" + PROGRAM
    remote = {**environment(), "POLAR_URL": "http://127.0.0.1:9", "POLAR_API_KEY": "none"}
    done = subprocess.run([sys.executable, "-c", program, "status"], env=remote, capture_output=True, text=True)
    assert "Is `polar serve` running there" in done.stderr
    assert set(done.stdout.splitlines()[-1].split()) & (MODELS | SERVER | STORE | {"numpy", "alembic"}) == set()


@pytest.mark.parametrize("name", VERBS)
def test_listed_help_of_a_verb_is_its_first_paragraph(name: str) -> None:
    loaded = VERBS[name].load()
    if isinstance(loaded, typer.Typer):
        text = solve_typer_info_help(typer.models.TyperInfo(loaded))
    else:
        text = inspect.cleandoc(loaded.__doc__ or "")
    assert VERBS[name].help == " ".join(text.split("\n\n")[0].split())
