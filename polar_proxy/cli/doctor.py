"""`polar doctor`: what is installed, what is missing, how to get it."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.markup import escape

from polar_proxy.cli import common, drift
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.config import Settings
from polar_proxy.errors import PolarError

State = Literal["ok", "missing", "failed"]

app = typer.Typer(invoke_without_command=True)
app.command("drift")(drift.drift)


@dataclass(frozen=True, slots=True)
class InstallCheck:
    """One finding. `needed`: Polar's own demo cannot run without it."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False


@app.callback()
def doctor(
    context: typer.Context,
    engine_url: Annotated[str | None, typer.Option(help="Also ask the vLLM server at this URL.")] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is there, what is missing and how to get it. Exit code 1 when something needed is missing."""
    if context.invoked_subcommand is not None:
        return
    settings = common.load_settings(db, engine={"url": engine_url})
    checks = common.run_async(_checks(settings, engine_url))
    bad = [check for check in checks if check.needed and check.state != "ok"]
    if as_json:
        common.print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            colour = {"ok": "green", "missing": "yellow", "failed": "red"}[check.state]
            mark = f"[{colour}]{check.state:<7}[/]"
            common.out.print(f"{mark} {check.name}: {escape(check.detail)}", highlight=False)
            if check.fix and check.state != "ok":
                common.out.print(f"          -> {escape(check.fix)}", highlight=False)
    if bad:
        raise typer.Exit(1)


async def _checks(settings: Settings, engine_url: str | None) -> list[InstallCheck]:
    checks = [_python(), _program("git", "install git with your system's package manager", needed=True)]
    checks += [
        _package("torch", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("transformers", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("aiodocker", "the docker sandbox", "pip install 'polar-proxy[docker]'"),
        _package("asyncpg", "PostgreSQL", "pip install 'polar-proxy[postgres]'"),
        _policy(),
        *_sandboxes(),
        *_harnesses(settings),
        await _database(settings),
    ]
    if engine_url:
        checks += await _engine(settings)
    return checks


def _python() -> InstallCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return InstallCheck("python", "ok" if good else "failed", version, "Polar needs Python 3.11 or newer", needed=True)


def _program(name: str, fix: str, *, needed: bool = False) -> InstallCheck:
    found = shutil.which(name)
    return InstallCheck(name, "ok" if found else "missing", found or "not on PATH", fix, needed)


def _package(name: str, purpose: str, fix: str) -> InstallCheck:
    try:
        return InstallCheck(name, "ok", f"{importlib.metadata.version(name)} (for {purpose})")
    except importlib.metadata.PackageNotFoundError:
        return InstallCheck(name, "missing", f"not installed (for {purpose})", fix)


def _policy() -> InstallCheck:
    from polar_proxy.engines.factory import POLAR_TINY

    weights = POLAR_TINY / "model.safetensors"
    if weights.is_file():
        return InstallCheck("polar-tiny", "ok", f"bundled policy, {weights.stat().st_size / 1e6:.1f} MB")
    return InstallCheck("polar-tiny", "missing", f"no weights in {POLAR_TINY}", "reinstall Polar")


def _sandboxes() -> list[InstallCheck]:
    from sandboxes import available

    return [
        InstallCheck(
            f"sandbox {item.kind}", "ok" if item.ok else "missing", item.why_not or "usable", item.how_to_get or ""
        )
        for item in available()
    ]


def _harnesses(settings: Settings) -> list[InstallCheck]:
    from harness_adapters.base import get_adapter, list_adapters

    checks = []
    for name in list_adapters():
        adapter = get_adapter(name)
        ready = adapter.is_installed(settings.harness_cache)
        detail = f"{adapter.default_version} " + ("installed" if ready else "is installed at its first run")
        fix = "nothing to do: `polar run` does it"
        checks.append(InstallCheck(f"harness {name}", "ok" if ready else "missing", detail, fix))
    return checks


async def _database(settings: Settings) -> InstallCheck:
    try:
        async with common.reader(settings) as store:
            return InstallCheck("database", "ok", f"{store.display_url}, schema {await store.schema_revision()}")
    except PolarError as error:
        return InstallCheck(
            "database", "missing", str(error), "`polar db upgrade` makes it; `polar run` and `serve` do too"
        )


async def _engine(settings: Settings) -> list[InstallCheck]:
    from polar_proxy.engines.factory import make_engine

    try:
        async with make_engine(settings.engine.model_copy(update={"kind": "vllm"})) as engine:
            info = engine.info
            able = ", ".join(sorted(info.capabilities))
            told = f"{info.engine} {info.version}, {info.model}, {info.logprob_mode}: {able}"
            problem = engine.continue_problem
            exact = "turns are sampled from the exact tokens of the turn before"
            return [
                InstallCheck("engine", "ok", told),
                InstallCheck("continue mode", "ok", exact)
                if problem is None
                else InstallCheck("continue mode", "missing", problem),
            ]
    except PolarError as error:
        return [InstallCheck("engine", "failed", str(error), "start the server, or correct --engine-url")]
