"""`polar conformance` runs real agents through Polar and checks whether all their calls are recorded and joined.

`polar doctor drift` shows where and why the prompts of one agent differ from the sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from harness_adapters.base import HarnessAdapter, list_adapters
from polar_proxy.cli import options
from polar_proxy.cli.common import import_named_code, load_settings, run_async
from polar_proxy.cli.harness import doctor_app, find_adapter, install_harness
from polar_proxy.cli.output import err, make_table, out, print_result, styled
from polar_proxy.errors import UsageError
from polar_proxy.terminal import one_line
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.config import EngineSettings
    from polar_proxy.conformance.fidelity import FidelityRow
    from polar_proxy.conformance.report import MeasurementReport
    from polar_proxy.traces.drift import DriftCause
    from polar_proxy.types import EngineInfo

NamedAdapters = list[tuple[HarnessAdapter, str | None]]
"""Harnesses with their versions; None is the default version."""

_COLOURS = {"ok": "green", "failed": "red", "n/a": "dim", "gives up": "cyan", "not run": "yellow"}


def conformance(
    harness: Annotated[
        list[str] | None, typer.Option(help="NAME[@VERSION] or module:Class. Repeatable. Default: all harnesses.")
    ] = None,
    engine: Annotated[str, typer.Option(help="scripted, local, vllm, or module:Class.")] = "scripted",
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    check: Annotated[list[str] | None, typer.Option(help="Run only this check, and write no file. Repeatable.")] = None,
    sandbox: options.Sandbox = "auto",
    slow: Annotated[
        float, typer.Option(min=0, help="Seconds before the first byte in the check slow_first_byte.")
    ] = 20.0,
    patience: Annotated[float, typer.Option(min=0.1, help="Factor for all time limits.")] = 1.0,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the report's two files. Default: benchmarks/results if all checks run with the scripted "
            "engine; otherwise no file is written."
        ),
    ] = None,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity",
            help="Instead of the checks, measure how prompts drift from the sampled tokens. scripts/fidelity.sh starts "
            "vLLM for this.",
        ),
    ] = False,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="With --fidelity: keeps (a chat template that keeps past reasoning) or strips (one that strips it). "
            "Repeatable. Default: both."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="With --fidelity: number of agents that run at a time.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Run the real agents through Polar, and count calls, edges between calls, retries and losses.

    Writes conformance.md and conformance.json; harnesses that are not run keep their rows there. Most checks need the
    scripted engine. The exit code is 0 if no check failed and no call was lost or recorded twice.

    With --fidelity, the engine gives answers that many agents and chat templates repeat inexactly. Later prompts then
    differ from the sampled tokens (drift). The agents run in both prompt modes, and the training sequences that drift
    splits are counted. With --out-dir, fidelity.md and fidelity.json are written. The exit code is 0 if every run was
    possible, every sampled token was counted, and drift split no sequence in continue mode.
    """
    from polar_proxy.conformance.report import CONFORMANCE, FIDELITY

    import_named_code(engine)
    settings = load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    adapters = _find_adapters(harness or ["all"])
    common: Json = {"cache": settings.harness_cache, "patience": patience, "progress": _print_progress}
    if fidelity:
        report = FIDELITY
        documents = _measure_fidelity(adapters, settings.engine, sandbox, template, concurrency=concurrency, **common)
    else:
        report = CONFORMANCE
        documents = _measure_conformance(adapters, settings.engine, sandbox, check, slow=slow, **common)
        if check:
            out_dir = None
        elif out_dir is None and engine == "scripted":
            out_dir = Path("benchmarks/results")
    found = run_async(_collect(documents, report, out_dir))

    def show() -> None:
        (_print_fidelity if fidelity else _print_conformance)(found)
        if out_dir is not None:
            out.print(f"written: {out_dir}/{report.name}.md, {out_dir}/{report.name}.json")

    print_result(found, show, as_json, good=report.is_good(found))


def _measure_fidelity(
    adapters: NamedAdapters, engine: EngineSettings, sandbox: str, templates: list[str] | None, **more: Any
) -> AsyncGenerator[Json, None]:
    from polar_proxy.conformance.fidelity import measure_fidelity
    from polar_proxy.conformance.forced_vllm import TEMPLATES, prescribed_engine

    for name in templates or ():
        options.require_choice("template", name, TEMPLATES)
    prescribed_engine(engine)  # raises UsageError if there is none
    return measure_fidelity(adapters, engine, sandbox, templates or list(TEMPLATES), **more)


def _measure_conformance(
    adapters: NamedAdapters, engine: EngineSettings, sandbox: str, checks: list[str] | None, **more: Any
) -> AsyncGenerator[Json, None]:
    from polar_proxy.conformance.checks import CHECKS
    from polar_proxy.conformance.measure import measure_conformance
    from polar_proxy.engines.factory import make_engine

    for name in checks or ():
        options.require_choice("check", name, CHECKS)
    return measure_conformance(adapters, make_engine(engine), sandbox, checks or list(CHECKS), **more)


def _find_adapters(names: list[str]) -> NamedAdapters:
    if "all" in names:
        every = [name for name in list_adapters() if name != "shell"]
        return [found for found in map(find_adapter, every) if not found[0].info.intercepted]
    found = [find_adapter(name) for name in names]
    for adapter, _ in found:
        if adapter.info.intercepted:
            raise UsageError(
                f"{adapter.name} cannot be measured, because its calls have to be intercepted. Leave it out."
            )
    return found


async def _collect(documents: AsyncGenerator[Json, None], report: MeasurementReport, out_dir: Path | None) -> Json:
    """Merge the documents of all measurements into one.

    The files in `out_dir` are written after each document, so that an interrupted run keeps its rows so far.
    """
    found = report.merged(None, {"schema": 1})
    async with aclosing(documents):
        async for new in documents:
            found = report.merged(found, new)
            if out_dir is not None:
                await asyncio.to_thread(report.save, out_dir, new)
    return found


def _print_progress(text: str) -> None:
    err.print(one_line(text))


def _print_conformance(found: Json) -> None:
    for row in found["harnesses"]:
        counts = f"{row['calls']} calls, {row['lost']} lost, {row['doubled']} recorded twice"
        heading = f"({row['dialect']}, streamed: {row['streamed']}, {counts})"
        out.print(styled("[bold]{}[/] {} {}", row["name"], row["version"], heading))
        cells = (
            ("", name, Text(result["status"], _COLOURS[result["status"]]), result["detail"])
            for name, result in row["checks"].items()
        )
        table = make_table(("", "check", "result", "detail"), cells, wrap=("detail",))
        table.show_header = False
        out.print(table)


def _print_fidelity(found: Json) -> None:
    columns = ("harness", "template", "mode", "calls", "continued", "drift", "traces", "recorded", "trained")
    keys = ("harness", "template", "mode", "calls", "bases", "drifted", "traces", "recorded", "trained")
    rows = []
    for row in found["rows"]:
        bad = row["mode"] == "continue" and row["drifted"]
        rows.append([Text(one_line(row[key]), "red" if bad and key == "drifted" else "") for key in keys])
    out.print(make_table(columns, rows))


@doctor_app.command("drift")
def drift(
    harness: Annotated[str, typer.Option(help="NAME[@VERSION] or module:Class.")],
    model: options.Model = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    turns: Annotated[int, typer.Option(min=2, help="Stop the harness after N model calls.")] = 8,
    task: Annotated[
        str | None, typer.Option(help="The instruction for the agent. Default: a small task with several commands.")
    ] = None,
    awkward: Annotated[
        bool,
        typer.Option(
            "--awkward",
            help="Have the engine give answers that many agents and chat templates repeat inexactly in later prompts. "
            "With vllm, this needs a plugin (scripts/fidelity.sh).",
        ),
    ] = False,
    sandbox: options.Sandbox = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the agent may run.")] = 300.0,
    as_json: options.AsJson = False,
) -> None:
    """Run a harness for some turns in render mode, and show where and why its prompts differ from the sampled tokens.

    Nothing is written to your database. The exit code is 0 with or without drift, and 1 if the harness called no model.
    """
    from polar_proxy.conformance.fidelity import measure_drift
    from polar_proxy.conformance.forced_vllm import prescribed_engine
    from polar_proxy.engines.factory import make_engine

    import_named_code(engine)
    settings = load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    awkward = awkward or settings.engine.kind == "scripted"
    used = (prescribed_engine if awkward else make_engine)(settings.engine)
    adapter, version = find_adapter(harness)
    installed = install_harness(adapter, version, settings.harness_cache, quiet=as_json)
    row = run_async(
        measure_drift(used, adapter, installed, sandbox, turns=turns, task=task, awkward=awkward, seconds=timeout)
    )
    found = _drift_json(row, used.info)
    print_result(found, lambda: _print_drift(row, used.info), as_json, good=row.fault is None)


def _drift_json(row: FidelityRow, info: EngineInfo) -> Json:
    from polar_proxy.traces.drift import CAUSE_FIXES

    verdict = "drift" if row.drifted else "no_drift" if row.bases else "nothing_to_compare"
    first = row.differences[0] if row.differences else None
    return {
        "harness": row.harness,
        "version": row.version,
        "engine": info.engine,
        "model": info.model,
        "can_continue": "continue" in info.capabilities,
        "verdict": verdict,
        "calls": row.calls,
        "bases": row.bases,
        "drifted": row.drifted,
        "causes": row.causes,
        "fixes": {cause: CAUSE_FIXES[cause] for cause in _drift_causes(row)},
        "first": None if first is None else {name: getattr(first, name) for name in first.__slots__},
        "outcomes": row.outcomes,
        "fault": row.fault,
    }


def _drift_causes(row: FidelityRow) -> list[DriftCause]:
    return list(dict.fromkeys(cause for difference in row.differences for cause in difference.causes))


def _print_drift(row: FidelityRow, info: EngineInfo) -> None:
    from polar_proxy.traces.drift import CAUSE_FIXES, CAUSE_MEANINGS

    if row.fault is not None:
        out.print(styled("[red]{}[/]: {}", row.harness, row.fault))
        return
    counts = (
        f"{row.calls} calls; {row.bases} continue an earlier answer, {row.drifted} of these without its exact tokens."
    )
    what = (row.harness, row.version, info.model, info.engine, counts)
    out.print(styled("[bold]{}[/] {} with {} on {}, render mode: {}", *what))
    if not row.bases:
        out.print("Nothing to compare: no call continued an answer. Try another --task, or a model that calls tools.")
        return
    if not row.differences:
        out.print(styled("[green]No drift[/]: every prompt begins with exactly the sampled tokens."))
        return
    first = row.differences[0]
    position = "before the answer" if first.in_answer is None else f"token {first.in_answer} of the answer"
    out.print(styled("\n[bold]the first difference[/]: token {} of the prompt ({})", first.position, position))
    out.print(one_line(f"  before   {first.before!r}"))
    out.print(one_line(f"  sampled  {_token_texts(first.sampled)}"))
    out.print(one_line(f"  rendered {_token_texts(first.rendered)}"))
    out.print(styled("\n[bold]causes[/]"))
    for causes, count in row.causes.items():
        out.print(f"  {count} x {causes}")
    out.print(styled("\n[bold]what they mean, and how to fix them[/]"))
    for cause in _drift_causes(row):
        out.print(styled("  [bold]{}[/]: {}.", cause, CAUSE_MEANINGS[cause]))
        out.print(f"    -> {CAUSE_FIXES[cause]}")
    if "continue" not in info.capabilities:
        out.print(f"\nThis engine ({info.engine}) cannot continue from tokens: `polar doctor --engine-url` says why.")


def _token_texts(texts: tuple[str, ...]) -> str:
    return " ".join(map(repr, texts)) or "(nothing)"
