"""`polar build`, `polar audit`, `polar rescore` and `polar export`: training data from recorded calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import import_named_code, load_settings, read_store_or_server, with_store
from polar_proxy.cli.output import (
    err,
    format_counts,
    format_number,
    make_table,
    out,
    print_note,
    print_result,
    progress_bars,
    styled,
)
from polar_proxy.errors import UsageError
from polar_proxy.terminal import JsonOutput, one_line
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.client import AsyncClient
    from polar_proxy.store import Store
    from polar_proxy.traces.audit import AuditReport
    from polar_proxy.traces.operations import RebuildReport, SessionTarget

NO_ROWS = 3
"""Exit code of an export without rows."""
Newest = Annotated[int | None, typer.Option("--limit", min=1, help="Only the newest N rollouts or sessions.")]
ScoringConcurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Sequences to score at a time.")]


def build(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROLLOUT|SESSION]...", help="Ids of rollouts or sessions.", show_default=False),
    ] = None,
    where: options.Where = None,
    builder: Annotated[
        str,
        typer.Option(
            help="merged (adds a call to a trace if the call's prompt begins with the whole trace), per_call (one "
            "trace per answer) or tree (stores shared prefixes once)."
        ),
    ] = "merged",
    on_drift: Annotated[
        str,
        typer.Option(
            help="With --builder merged, how to treat a prompt that differs from the sampled tokens: split (opens a "
            "new trace), canonical (joins it anyway; the trace is approximate) or rescore (as canonical, with "
            "log-probabilities by --engine).",
        ),
    ] = "split",
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Build the traces of rollouts and sessions from their recorded calls, replacing the builder's earlier traces.

    The calls are not changed, so every other builder can still be used later. Without ids and --where, everything is
    built. --engine is needed for `--on-drift rescore` only.
    """
    if ids and where is not None:
        raise UsageError("Give either ids or --where, not both.")
    if on_drift == "rescore" and engine is None:
        raise UsageError("--on-drift rescore needs an engine that scores tokens: name it with --engine.")
    import_named_code(engine)
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> RebuildReport:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.operations import find_targets, rebuild

        session_ids = []
        for one in ids or ():
            rollout = await store.rollouts.get(one)
            session_ids.append(one if rollout is None else rollout.session_id or one)
        targets = await find_targets(store, where=where, session_ids=session_ids)
        await _note_no_match(store, where, targets)
        if on_drift != "rescore":
            return await rebuild(store, targets, builder=builder, on_drift=on_drift)
        async with make_engine(settings.engine) as entered:
            return await rebuild(store, targets, builder=builder, on_drift=on_drift, engine=entered)

    found = with_store(settings, work).to_json()
    chosen = {"builder": builder, "on_drift": on_drift if builder == "merged" else None}
    print_result({**chosen, **found}, lambda: _print_built(found), as_json)


async def _note_no_match(store: Store, where: str | None, targets: Sequence[SessionTarget]) -> None:
    """If `where` selects nothing, print for each of its conditions how many rollouts match it.

    For a condition that matches none, the existing values of its field are printed.
    """
    if where is not None and not targets:
        print_note(await store.rollouts.explain_no_match(where))


def _print_built(found: Json) -> None:
    columns = ("session", "rollout", "calls", "trained", "excluded", "traces", "tokens", "sampled", "grades", "drift")
    rows = (
        (
            row["session_id"],
            row["rollout_id"] or "-",
            row["calls"]["recorded"],
            row["calls"]["trained"],
            format_counts(row["calls"]["excluded"]),
            row["traces"],
            row["tokens"],
            row["trained_tokens"],
            format_counts(row["grades"]),
            format_counts(row["drift"]),
        )
        for row in found["sessions"]
    )
    numbers = ("calls", "trained", "traces", "tokens", "sampled")
    out.print(make_table(columns, rows, right=numbers, wrap=columns[2:]))
    if found["skipped"]:
        print_note(f"skipped, because they still run: {format_counts(Counter(found['skipped'].values()))}")


def audit(
    where: options.Where = None,
    session: options.Sessions = None,
    builder: Annotated[str, typer.Option(help="Audit the traces of this builder: merged, per_call, tree.")] = "merged",
    limit: Newest = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    policy_version: Annotated[
        str | None, typer.Option(help="Policy version of the engine's weights, if the engine does not report it.")
    ] = None,
    same_model: Annotated[
        bool,
        typer.Option("--same-model", help="Accept traces whose model name or chat template differs from the engine's."),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="Reject traces if a log-probability differs by more than this many nats. 0.01 suits fp32 engines.",
        ),
    ] = 0.01,
    concurrency: ScoringConcurrency = 4,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Score traces again with the engine, and compare the log-probabilities with the recorded ones.

    Each trace gets a grade, which is stored. The exit code is 1 if a trace was rejected.
    """
    import_named_code(engine)
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> Json:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.audit import AuditReference
        from polar_proxy.traces.operations import audit_store, find_targets

        targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
        await _note_no_match(store, where, targets)
        async with make_engine(settings.engine) as entered:
            version = policy_version or await entered.weight_version()
            reference = AuditReference(entered.info, version, tolerance, same_model)
            with progress_bars() as update:
                report = await audit_store(
                    store,
                    entered,
                    reference,
                    targets,
                    builder=builder,
                    at_once=concurrency,
                    progress=lambda report: update("audit", report.sessions, len(targets), _audit_progress(report)),
                )
            texts = [
                (await entered.decode([worst.token_id]), await entered.decode(list(worst.before)))
                for worst, _ in report.worst
            ]
        return report.to_json(texts)

    found = with_store(settings, work)
    print_result(found, lambda: _print_audit(found), as_json, good=not found["grades"].get("rejected"))


def _audit_progress(report: AuditReport) -> str:
    rate = report.scored_tokens / report.seconds if report.seconds else 0.0
    return f"{report.all.traces} traces, {report.grades['rejected']} rejected, {rate:,.0f} tokens/s"


def _print_audit(found: Json) -> None:
    engine = found["engine"]
    version = engine["policy_version"] or "unknown"
    out.print(styled("against {} {}, {}, policy {}", engine["engine"], engine["version"], engine["model"], version))
    rows = [("all", found)]
    rows += [(f"harness {name}", row) for name, row in sorted(found["by_harness"].items())]
    rows += [(f"policy version {name}", row) for name, row in sorted(found["by_policy_version"].items())]
    numbers = ("traces", "tokens", "max |diff|", "mean |diff|")
    cells = (
        (
            name,
            row["traces"],
            row["tokens"],
            format_number(row["max_abs_diff"], ".2e"),
            format_number(row["mean_abs_diff"], ".2e"),
        )
        for name, row in rows
    )
    out.print(make_table(("", *numbers), cells, right=numbers))
    for title, counts in (
        ("grades", found["grades"]),
        ("traces not compared", found["skipped"]),
        ("tokens not compared", found["skipped_tokens"]),
        ("findings", found["findings"]),
    ):
        if counts:
            out.print(styled("{}: {}", title, format_counts(counts)))
    if found["skipped"].get("not_built"):
        out.print(styled("[dim]`polar build SESSION` builds the traces of `polar serve` sessions[/]"))
    if found["worst"]:
        out.print("\nlargest differences")
    for worst in found["worst"]:
        values = f"{worst['recorded']:.4f} recorded, {worst['fresh']:.4f} fresh"
        out.print(f"  {worst['diff']:.2e}  {values}  {worst['call_id']} token {worst['position']}")
        out.print(styled("      [dim]{}[/][bold]{}[/]", worst["before"], worst["token"]))
    for trace_id, reasons in found["rejected"].items():
        out.print(styled("[red]rejected[/] {}: {}", trace_id, reasons))


def rescore(
    where: options.Where = None,
    session: options.Sessions = None,
    limit: Newest = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    concurrency: ScoringConcurrency = 4,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Give recorded text the tokens and log-probabilities of another engine, and build off-policy traces from it.

    These traces have the builder `rescored` and the grade `approximate`, because the engine did not sample the text.
    Only `polar export --builder rescored --all-grades` exports them.
    """
    if engine is None:
        raise UsageError("Name the engine that scores: --engine vllm --engine-url URL, or --engine local.")
    import_named_code(engine)
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> Json:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.operations import find_targets, rescore_session
        from polar_proxy.traces.scoring import RescoreReport, Scorer, require_end_of_turn

        report = RescoreReport()
        targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
        await _note_no_match(store, where, targets)
        async with make_engine(settings.engine) as entered:
            require_end_of_turn(entered)
            scorer = Scorer(entered, concurrency)
            with progress_bars() as update:
                for number, target in enumerate(targets, 1):
                    await rescore_session(store, scorer, target, report)
                    note = f"{report.answers} answers, {report.scored_tokens:,} tokens scored"
                    update("rescore", number, len(targets), note)
            info = entered.info
        return {**report.to_json(), "engine": {"engine": info.engine, "version": info.version, "model": info.model}}

    found = with_store(settings, work)
    scorer = found["engine"]
    made = f"{found['answers']} answers of {found['calls']} calls, {found['tokens']} tokens, {found['traces']} traces"
    lines = [one_line(f"rescored by {scorer['engine']}, {scorer['model']}: {made}")]
    if found["skipped"]:
        lines.append(f"calls left out: {format_counts(found['skipped'])}")
    if found["traces"]:
        lines.append("off-policy, graded approximate: polar export --builder rescored --all-grades")
    print_result(found, "\n".join(lines), as_json)


def export(
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="jsonl, chat-jsonl, preference-jsonl, tokens-jsonl; for other trainers: trl, verl, slime, nemo-rl, "
            "tinker.",
        ),
    ] = "jsonl",
    where: options.Where = None,
    session: options.Sessions = None,
    builder: Annotated[
        str, typer.Option(help="Export the traces that this builder made: merged, per_call, tree or rescored.")
    ] = "merged",
    all_grades: Annotated[
        bool, typer.Option(help="Also export traces that were graded approximate or rejected.")
    ] = False,
    advantage: Annotated[
        str, typer.Option(help="Advantage function of the formats trl and tinker: grpo, dr_grpo, rloo, mc_grpo, raft.")
    ] = "grpo",
    file: Annotated[str, typer.Option("--out", help="File to write; - is standard output.")] = "-",
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Write recorded runs as JSON lines, and print counts of what was left out to standard error.

    --json prints these counts as one JSON document on standard output; --out must then be a file. If there are no
    rows, the reasons are printed and the exit code is 3. Ctrl-C prints the counts so far. A file is written completely
    or not at all.
    """
    if as_json and file == "-":
        raise UsageError("--json reports on standard output, so --out must be a file.")
    chosen = {"where": where, "builder": builder, "all_grades": all_grades, "advantage": advantage}
    report = read_store_or_server(
        url,
        db,
        lambda store, settings: _export_store(store, form, file, session_ids=session or (), **chosen),
        lambda client: _export_server(client, form, file, sessions=session or (), **chosen),
    )
    print_result({"out": file, "format": form, **report}, partial(_print_export, report), as_json)
    if not report["rows"]:
        raise typer.Exit(NO_ROWS)


async def _export_store(store: Store, form: str, file: str, **options: Any) -> Json:
    """Write the rows, and return the fields of their ExportSummary."""
    from polar_proxy.export.exporter import ExportReport
    from polar_proxy.export.exporter import export as export_rows

    report = ExportReport()
    try:
        with open_output(file) as target:
            await export_rows(store, form, target.write, report, **options)
    except asyncio.CancelledError:
        _note_stopped(_export_counts(report.to_json()), file)
        raise
    return report.to_json()


async def _export_server(client: AsyncClient, form: str, file: str, **options: Any) -> Json:
    """Write the rows of a server, and return the fields of their ExportSummary."""
    rows = 0
    try:
        with open_output(file) as target:
            async for item in client.export(form, **options):
                if not isinstance(item, bytes):
                    return item.model_dump()
                target.write(item)
                rows += item.count(b"\n")
    except asyncio.CancelledError:
        _note_stopped(f"{rows} rows", file)
        raise
    raise AssertionError("unreachable: an export without its counts raises an error")


def _note_stopped(counts: str, file: str) -> None:
    fate = "written so far" if file == "-" else f"{file} was not written, because it would be incomplete"
    print_note(f"{counts}; {fate}")


def _print_export(report: Json) -> None:
    left_out = format_counts(report["left_out"]) if report["left_out"] else "nothing"
    err.print(one_line(f"{_export_counts(report)}; left out: {left_out}"))
    for reason in report["reasons"]:
        print_note(f"  {reason}")


def _export_counts(report: Json) -> str:
    return f"{report['rows']} rows from {report['rollouts']} rollouts and {report['sessions']} other sessions"


def open_output(file: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open standard output (`-`), or a file that gets its name only when it is complete."""
    return _open_stdout() if file == "-" else _open_file(file)


@contextlib.contextmanager
def _open_stdout() -> Iterator[BinaryIO]:
    try:
        try:
            yield cast(BinaryIO, JsonOutput())
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) ended; Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _open_file(file: str) -> Iterator[BinaryIO]:
    path = Path(file).resolve()
    if not file or path.is_dir():
        raise UsageError(f"Cannot write {file!r}: --out must name a file, not a folder.")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    replaces = path.is_file() or not path.exists()  # /dev/null or a named pipe is written to, never replaced
    try:
        with (unfinished if replaces else path).open("wb") as target:
            yield target
        if replaces:
            unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"Cannot write {file}: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
