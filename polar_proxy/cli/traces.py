"""`polar build`, `polar audit` and `polar rescore`: training sequences from recorded calls."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli.common import (
    DbOption,
    EngineOption,
    EngineUrlOption,
    JsonOption,
    ModelOption,
    SessionsOption,
    WhereOption,
    load_settings,
    with_store,
)
from polar_proxy.cli.output import format_counts, format_number, make_table, out, print_json, print_note, progress_bar
from polar_proxy.errors import UsageError
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.store import Store
    from polar_proxy.traces.audit import AuditReport
    from polar_proxy.traces.operations import RebuildReport

NewestOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the newest N rollouts or sessions.")]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, help="Sequences to score at a time.")]


def build(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROLLOUT|SESSION]...", help="Ids of rollouts or sessions.", show_default=False),
    ] = None,
    where: WhereOption = None,
    builder: Annotated[str, typer.Option(help="merged, per_call or tree.")] = "merged",
    on_drift: Annotated[
        str, typer.Option(help="What the merged builder does with a drifted turn: split, canonical or rescore.")
    ] = "split",
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    model: ModelOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the traces of rollouts and sessions from their recorded calls, replacing the builder's earlier traces.

    The calls do not change, so that every other builder can be used later. Without ids and --where, everything is
    built. --engine is needed for `--on-drift rescore` only.
    """
    if ids and where is not None:
        raise UsageError("Give either ids or --where, which selects rollouts.")
    if on_drift == "rescore" and engine is None:
        raise UsageError("--on-drift rescore scores with an engine: name it with --engine.")
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> RebuildReport:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.operations import find_targets, rebuild

        session_ids = []
        for one in ids or ():
            rollout = await store.rollouts.get(one)
            session_ids.append(one if rollout is None else rollout.session_id or one)
        targets = await find_targets(store, where=where, session_ids=session_ids)
        if on_drift != "rescore":
            return await rebuild(store, targets, builder=builder, on_drift=on_drift)
        async with make_engine(settings.engine) as entered:
            return await rebuild(store, targets, builder=builder, on_drift=on_drift, engine=entered)

    found = with_store(settings, work).to_json()
    if as_json:
        print_json({"builder": builder, "on_drift": on_drift if builder == "merged" else None, **found})
    else:
        _print_built(found)


def _print_built(found: Json) -> None:
    numbers = ("calls", "trained", "traces", "tokens", "sampled")
    columns = ("session", "rollout", "calls", "trained", "excluded", *numbers[2:], "grades", "drift")
    table = make_table(*columns, right=numbers, wrap=columns[2:])
    for row in found["sessions"]:
        calls = row["calls"]
        table.add_row(
            row["session_id"],
            row["rollout_id"] or "-",
            str(calls["recorded"]),
            str(calls["trained"]),
            escape(format_counts(calls["excluded"])),
            *(str(row[name]) for name in ("traces", "tokens", "trained_tokens")),
            escape(format_counts(row["grades"])),
            escape(format_counts(row["drift"])),
        )
    out.print(table)
    if found["skipped"]:
        print_note(f"skipped, because they still run: {format_counts(Counter(found['skipped'].values()))}")


def audit(
    where: WhereOption = None,
    session: SessionsOption = None,
    builder: Annotated[str, typer.Option(help="Audit the traces of this builder: merged, per_call, tree.")] = "merged",
    limit: NewestOption = None,
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    model: ModelOption = None,
    policy_version: Annotated[
        str | None, typer.Option(help="Version of the engine's weights, if the engine does not report it.")
    ] = None,
    same_model: Annotated[
        bool, typer.Option("--same-model", help="Accept the engine's model, although its name or template differs.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Reject traces with a larger difference, in nats. 0.01 suits fp32 engines.")
    ] = 0.01,
    concurrency: ConcurrencyOption = 4,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score traces again with the engine, and compare with the recorded log-probabilities.

    The resulting grade of each trace is stored. The exit code is 1 if a trace was rejected.
    """
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> tuple[AuditReport, Json]:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.audit import AuditReference
        from polar_proxy.traces.operations import audit_store, find_targets

        targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
        async with make_engine(settings.engine) as entered:
            version = policy_version or await entered.weight_version()
            reference = AuditReference(entered.info, version, tolerance, same_model)
            with progress_bar("audit", len(targets)) as update:
                report = await audit_store(
                    store,
                    entered,
                    reference,
                    targets,
                    builder=builder,
                    at_once=concurrency,
                    progress=lambda report: update(report.sessions, _audit_progress(report)),
                )
            texts = [
                (await entered.decode([worst.token_id]), await entered.decode(list(worst.before)))
                for worst, _ in report.worst
            ]
        return report, report.to_json(texts)

    report, found = with_store(settings, work)
    if as_json:
        print_json(found)
    else:
        _print_audit(found)
    if report.grades["rejected"]:
        raise typer.Exit(1)


def _audit_progress(report: AuditReport) -> str:
    rate = report.scored_tokens / report.seconds if report.seconds else 0.0
    return f"{report.all.traces} traces, {report.grades['rejected']} rejected, {rate:,.0f} tokens/s"


def _print_audit(found: Json) -> None:
    engine = found["engine"]
    version = engine["policy_version"] or "unknown"
    out.print(f"against {engine['engine']} {engine['version']}, {engine['model']}, policy {version}")
    numbers = ("traces", "tokens", "max |diff|", "mean |diff|")
    table = make_table("", *numbers, right=numbers)
    rows = [("all", found)]
    rows += [(f"harness {name}", row) for name, row in sorted(found["by_harness"].items())]
    rows += [(f"policy version {name}", row) for name, row in sorted(found["by_policy_version"].items())]
    for name, row in rows:
        differences = [format_number(row[key], ".2e") for key in ("max_abs_diff", "mean_abs_diff")]
        table.add_row(escape(name), str(row["traces"]), str(row["tokens"]), *differences)
    out.print(table)
    for title, counts in (
        ("grades", found["grades"]),
        ("traces not compared", found["skipped"]),
        ("tokens not compared", found["skipped_tokens"]),
        ("findings", found["findings"]),
    ):
        if counts:
            out.print(f"{title}: {format_counts(counts)}")
    if found["skipped"].get("not_built"):
        out.print("[dim]`polar build SESSION` builds the traces of `polar serve` sessions[/]")
    if found["worst"]:
        out.print("\nlargest differences")
    for worst in found["worst"]:
        values = f"{worst['recorded']:.4f} recorded, {worst['fresh']:.4f} fresh"
        out.print(f"  {worst['diff']:.2e}  {values}  {worst['call_id']} token {worst['position']}")
        out.print(f"      [dim]{escape(_one_line(worst['before']))}[/][bold]{escape(_one_line(worst['token']))}[/]")
    for trace_id, reasons in found["rejected"].items():
        out.print(f"[red]rejected[/] {trace_id}: {escape(reasons)}")


def _one_line(text: str) -> str:
    """Return the text with line breaks and tabs written as escapes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def rescore(
    where: WhereOption = None,
    session: SessionsOption = None,
    limit: NewestOption = None,
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    model: ModelOption = None,
    concurrency: ConcurrencyOption = 4,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give recorded text the tokens and log-probabilities of another engine, and build off-policy traces from it.

    Their builder is `rescored` and their grade `approximate`, because the engine did not sample the text. Only
    `polar export --builder rescored --all-grades` exports them.
    """
    if engine is None:
        raise UsageError("Name the engine that scores: --engine vllm --engine-url URL, or --engine local.")
    settings = load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work(store: Store) -> Json:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.operations import find_targets, rescore_session
        from polar_proxy.traces.scoring import RescoreReport, Scorer, require_scoring_engine

        report = RescoreReport()
        targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
        async with make_engine(settings.engine) as entered:
            require_scoring_engine(entered)
            scorer = Scorer(entered, concurrency)
            with progress_bar("rescore", len(targets)) as update:
                for number, target in enumerate(targets, 1):
                    await rescore_session(store, scorer, target, report)
                    update(number, f"{report.answers} answers, {report.scored_tokens:,} tokens scored")
            info = entered.info
        return {
            **report.to_json(),
            "engine": {"engine": info.engine, "version": info.version, "model": info.model},
        }

    found = with_store(settings, work)
    if as_json:
        print_json(found)
        return
    scorer = found["engine"]
    made = f"{found['answers']} answers of {found['calls']} calls, {found['tokens']} tokens, {found['traces']} traces"
    out.print(f"rescored by {scorer['engine']}, {escape(scorer['model'])}: {made}")
    if found["skipped"]:
        out.print(f"calls left out: {format_counts(found['skipped'])}")
    if found["traces"]:
        out.print("off-policy, graded approximate: polar export --builder rescored --all-grades")
