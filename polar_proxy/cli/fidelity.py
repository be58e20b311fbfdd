"""`polar conformance --fidelity`: the same answers in both prompt modes, and how many sequences drift splits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson
from rich.markup import escape
from rich.table import Table

from harness_adapters.base import HarnessAdapter, HarnessError
from polar_proxy.cli import common
from polar_proxy.config import Settings
from polar_proxy.conformance.fidelity import (
    CUT_EVERY,
    MODES,
    TEMPLATES,
    FidelityJob,
    FidelityRow,
    ForcedVllmEngine,
    document,
    markdown,
    merged,
    play,
)
from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.types import EngineInfo, Json
from sandboxes import choose


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What the flags ask for."""

    adapters: Sequence[tuple[HarnessAdapter, str | None]]
    templates: Sequence[str]
    sandbox: str
    at_once: int
    patience: float
    out_dir: Path | None


def check(settings: Settings, wanted: FidelityOptions) -> None:
    """Raises UsageError for what cannot be run."""
    if settings.engine.kind not in ("vllm", "scripted"):
        raise UsageError(
            "--fidelity needs an engine that can be told what to say: vllm (scripts/fidelity.sh) or scripted."
        )
    if settings.engine.kind == "vllm" and not settings.engine.url:
        raise UsageError("--engine vllm needs --engine-url; scripts/fidelity.sh starts a server and runs this.")
    if unknown := [name for name in wanted.templates if name not in TEMPLATES]:
        raise UsageError(f"There is no template {unknown[0]!r}: {', '.join(TEMPLATES)}.")


async def run(settings: Settings, wanted: FidelityOptions) -> Json:
    """Play everything; the files are written after each run, so that a stop keeps what was measured."""
    check(settings, wanted)
    choice = await asyncio.to_thread(choose, wanted.sandbox)  # type: ignore[arg-type]
    jobs = await _jobs(settings, wanted)
    found: Json = {"schema": 1, "rows": []}

    def engine(template: str) -> Engine:
        if settings.engine.kind == "scripted":
            return ScriptedEngine()
        path = TEMPLATES[template]
        text = None if path is None else path.read_text()
        return ForcedVllmEngine(str(settings.engine.url), model=settings.engine.model, template=text)

    def began(job: FidelityJob) -> None:
        common.err.print(f"{job.adapter.name}, {job.template}, {job.mode}", highlight=False, markup=False)

    runs = play(jobs, engine, choice.kind, at_once=wanted.at_once, patience=wanted.patience, began=began)
    async for played in runs:
        _progress(played.row)
        made = document(
            [played.row],
            engine=_named(played.engine),
            sandbox=choice.kind,
            cut_every=CUT_EVERY if settings.engine.kind == "vllm" else 0,
            measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
        found = merged(found, made)
        if wanted.out_dir is not None:
            await asyncio.to_thread(_write, wanted.out_dir, made)
    return found


def good(found: Json) -> bool:
    """No run failed, no sequence was split by drift in continue mode, and all books add up."""
    return all(
        row["fault"] is None and row["adds_up"] and not (row["mode"] == "continue" and row["drifted"])
        for row in found["rows"]
    )


def show(found: Json, out_dir: Path | None) -> None:
    table = Table("harness", "template", "mode", "calls", "go on", "drift", "traces", "recorded", "trained", box=None)
    for row in found["rows"]:
        bad = row["mode"] == "continue" and row["drifted"]
        drift = f"[red]{row['drifted']}[/]" if bad else str(row["drifted"])
        numbers = [str(row[key]) for key in ("traces", "recorded", "trained")]
        table.add_row(
            row["harness"], row["template"], row["mode"], str(row["calls"]), str(row["bases"]), drift, *numbers
        )
    common.out.print(table)
    if out_dir is not None:
        common.out.print(f"written: {out_dir}/fidelity.md, {out_dir}/fidelity.json", highlight=False)


async def _jobs(settings: Settings, wanted: FidelityOptions) -> list[FidelityJob]:
    jobs = []
    for adapter, version in wanted.adapters:
        try:
            installed = await asyncio.to_thread(adapter.install, settings.harness_cache, version)
        except HarnessError as error:
            common.err.print(f"[red]{escape(adapter.name)}[/]: not run: {escape(str(error)[:300])}", highlight=False)
            continue
        jobs += [FidelityJob(adapter, installed, template, mode) for template in wanted.templates for mode in MODES]
    return jobs


def _progress(row: FidelityRow) -> None:
    told = row.fault or f"{row.calls} calls, {row.drifted} splits by drift, {row.traces} traces, {row.seconds:.0f} s"
    common.err.print(f"{row.harness}, {row.template}, {row.mode}: {told}", highlight=False, markup=False)


def _named(info: EngineInfo) -> str:
    return info.engine if info.engine == "scripted" else f"{info.engine} {info.version}, {info.model}"


def _write(folder: Path, made: Json) -> None:
    path = folder / "fidelity.json"
    old = orjson.loads(path.read_bytes()) if path.is_file() else None
    found = merged(old, made)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    (folder / "fidelity.md").write_text(markdown(found))
