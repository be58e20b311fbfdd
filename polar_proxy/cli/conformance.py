"""`polar conformance`: every real agent against the real gateway, measured, as a table."""

from __future__ import annotations

import asyncio
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from harness_adapters.base import HarnessAdapter, HarnessError, get_adapter, list_adapters, split_version
from polar_proxy.cli import common, fidelity
from polar_proxy.cli.common import JsonOption
from polar_proxy.config import Settings
from polar_proxy.conformance import (
    CHECK_NAMES,
    PROFILES,
    CheckResult,
    HarnessRow,
    ScenarioRunner,
    document,
    markdown,
    measure,
    merged,
)
from polar_proxy.conformance.fidelity import TEMPLATES
from polar_proxy.engines.base import Engine
from polar_proxy.engines.factory import make_engine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.store import open_store
from polar_proxy.types import Json
from sandboxes import choose

_COLOURS = {"ok": "green", "failed": "red", "n/a": "dim", "gives up": "cyan", "not run": "yellow"}


def conformance(
    harness: Annotated[
        list[str] | None, typer.Option(help="NAME[@VERSION] or module:Class; may be given again. all: every one.")
    ] = None,
    engine: Annotated[str, typer.Option(help="scripted, local, vllm, or module:Class.")] = "scripted",
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Only this check; may be given again.")] = None,
    sandbox: Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.")] = "auto",
    slow: Annotated[float, typer.Option(min=0, help="Seconds that a slow first byte takes.")] = 20.0,
    patience: Annotated[float, typer.Option(min=0.1, help="Multiplies all time limits.")] = 1.0,
    out_dir: Annotated[
        Path | None, typer.Option(help="Where conformance.md and .json are written; docs for the scripted engine.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--fidelity", help="Measure drift of tokens instead; needs scripts/fidelity.sh's server.")
    ] = False,
    template: Annotated[
        list[str] | None, typer.Option(help="With --fidelity: keeps, strips; both if not given.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="With --fidelity: how many agents run at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run the real agents through Polar and measure what arrives: calls, edges, retries, losses.

    Writes conformance.md and conformance.json; harnesses that were not run keep the rows they have there. With --check
    only a part is measured, and nothing is written; with an engine that is not scripted most checks cannot be made, and
    nothing is written but to an --out-dir that was given. Exit code 0 when no check failed and no call was lost or
    doubled. --fidelity plays other answers, in both prompt modes, and counts the training sequences that drift splits;
    exit code 0 when there is none in continue mode.
    """
    wanted = check or list(CHECK_NAMES)
    if unknown := [name for name in wanted if name not in CHECK_NAMES]:
        raise UsageError(f"There is no check {unknown[0]!r}: {', '.join(CHECK_NAMES)}.")
    if sandbox not in ("auto", "docker", "bubblewrap", "process"):
        raise UsageError(f"There is no sandbox {sandbox!r}: auto, docker, bubblewrap or process.")
    settings = common.load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    adapters = _adapters(harness or ["all"])
    if tokens:
        templates = template or list(TEMPLATES)
        _fidelity(settings, fidelity.FidelityOptions(adapters, templates, sandbox, at_once, patience, out_dir), as_json)
        return
    if check:
        out_dir = None
    elif out_dir is None and engine == "scripted":
        out_dir = Path("docs")
    found = common.run_async(_run(settings, adapters, wanted, sandbox, slow, patience, out_dir))
    if as_json:
        common.print_json(found)
    else:
        _print(found, out_dir)
    if not all(_good(row) for row in found["harnesses"]):
        raise typer.Exit(1)


def _fidelity(settings: Settings, wanted: fidelity.FidelityOptions, as_json: bool) -> None:
    found = common.run_async(fidelity.run(settings, wanted))
    if as_json:
        common.print_json(found)
    else:
        fidelity.show(found, wanted.out_dir)
    if not fidelity.good(found):
        raise typer.Exit(1)


def _adapters(names: list[str]) -> list[tuple[HarnessAdapter, str | None]]:
    if "all" in names:
        names = [name for name in PROFILES if name in list_adapters()]
    try:
        return [(get_adapter(bare), version) for bare, version in map(split_version, names)]
    except (HarnessError, TypeError) as error:
        raise UsageError(str(error)) from error


async def _run(
    settings: Settings,
    adapters: list[tuple[HarnessAdapter, str | None]],
    checks: list[str],
    sandbox: str,
    slow: float,
    patience: float,
    out_dir: Path | None,
) -> Json:
    """One harness at a time. The files are written after each, so that a stop keeps what was measured."""
    choice = await asyncio.to_thread(choose, sandbox)  # type: ignore[arg-type]
    engine = make_engine(settings.engine)
    found: Json = {"schema": 1, "harnesses": []}
    with tempfile.TemporaryDirectory(prefix="polar-conformance-") as folder:
        async with (
            open_store(f"sqlite:///{folder}/conformance.db") as store,
            ScenarioRunner(engine, store, choice.kind, patience=patience) as bench,
        ):
            for number, (adapter, version) in enumerate(adapters, 1):
                row = await _one(bench, settings, adapter, version, checks, slow, f"{number}/{len(adapters)}")
                made = document(
                    [row],
                    engine=_named(engine),
                    sandbox=choice.kind,
                    slow=slow,
                    measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                )
                found = merged(found, made)
                if out_dir is not None:
                    await asyncio.to_thread(_write, out_dir, made)
    return found


async def _one(
    bench: ScenarioRunner,
    settings: Settings,
    adapter: HarnessAdapter,
    version: str | None,
    checks: list[str],
    slow: float,
    place: str,
) -> HarnessRow:
    name = f"{place} {adapter.name}"
    with common.err.status(escape(name)) as status:

        def progress(text: str) -> None:
            status.update(escape(f"{name}: {text}"))
            if not common.err.is_terminal:
                common.err.print(f"{name}: {text}", highlight=False, markup=False)

        try:
            if not await asyncio.to_thread(adapter.is_installed, settings.harness_cache, version):
                progress("installing (once; a minute or two)")
            installed = await asyncio.to_thread(adapter.install, settings.harness_cache, version)
        except HarnessError as error:
            row = HarnessRow(adapter.name, version or adapter.default_version, "-", "-")
            row.checks = dict.fromkeys(checks, CheckResult("not run", f"could not be installed: {str(error)[:300]}"))
        else:
            row = await measure(bench, adapter, installed, checks, slow=slow, progress=progress)
    state = "[green]ok[/]" if row.good else "[red]failed[/]"
    told = f"{row.calls} calls, {row.lost} lost, {row.doubled} doubled, {row.seconds:.0f} s"
    common.err.print(f"{escape(name)} {escape(row.version)}: {state} ({told})", highlight=False)
    return row


def _named(engine: Engine) -> str:
    info = engine.info
    return info.engine if isinstance(engine, ScriptedEngine) else f"{info.engine} {info.version}, {info.model}"


def _write(folder: Path, made: Json) -> None:
    path = folder / "conformance.json"
    old = orjson.loads(path.read_bytes()) if path.is_file() else None
    found = merged(old, made)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    (folder / "conformance.md").write_text(markdown(found))


def _good(row: Json) -> bool:
    failed = any(cell["status"] == "failed" for cell in row["checks"].values())
    return not (failed or row["lost"] or row["doubled"])


def _print(found: Json, out_dir: Path | None) -> None:
    for row in found["harnesses"]:
        told = f"{row['dialect']}, streamed: {row['streamed']}, {row['calls']} calls, {row['lost']} lost"
        common.out.print(f"[bold]{escape(row['name'])}[/] {row['version']} ({told}, {row['doubled']} doubled)")
        table = Table(box=None, padding=(0, 1), show_header=False)
        for name, cell in row["checks"].items():
            colour = _COLOURS[cell["status"]]
            table.add_row("", name, f"[{colour}]{cell['status']}[/]", escape(cell["detail"]))
        common.out.print(table)
    if out_dir is not None:
        common.out.print(f"written: {out_dir}/conformance.md, {out_dir}/conformance.json", highlight=False)
