"""`polar audit`: are the recorded log-probabilities those of the model?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.progress import counting
from polar_proxy.traces.audit import TOLERANCE, AuditReference, AuditReport
from polar_proxy.traces.operations import audit_store, find_targets
from polar_proxy.types import Json

Texts = list[tuple[str, str]]


def audit(
    where: Annotated[str | None, typer.Option(help="Conditions on rollouts, such as 'harness=codex'.")] = None,
    session: Annotated[list[str] | None, typer.Option(help="Just this session (may be repeated).")] = None,
    builder: Annotated[str, typer.Option(help="Whose traces: merged, per_call, tree, ...")] = "merged",
    limit: Annotated[int | None, typer.Option(min=1, help="The newest so many rollouts or sessions.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    policy_version: Annotated[
        str | None, typer.Option(help="The version of the engine's weights, where it does not tell the right one.")
    ] = None,
    same_model: Annotated[
        bool, typer.Option("--same-model", help="It is the recorded model, under another name or template.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Nats; traces with a larger difference are rejected. For fp32 engines.")
    ] = TOLERANCE,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run traces through the engine afresh and compare: recorded log-probabilities against the model's own.

    The grade of each trace is stored. Exit code 1 if one was rejected.
    """
    settings = common.load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work() -> tuple[AuditReport, Texts]:
        from polar_proxy.engines.factory import make_engine

        async with common.reader(settings) as store:
            targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
            async with make_engine(settings.engine) as entered:
                version = policy_version or await entered.weight_version()
                against = AuditReference(entered.info, version, tolerance, same_model)
                with counting("audit", len(targets)) as told:
                    report = await audit_store(
                        store,
                        entered,
                        against,
                        targets,
                        builder=builder,
                        at_once=concurrency,
                        progress=lambda report: told(report.sessions, _said(report)),
                    )
                texts = [
                    (await entered.decode([worst.token_id]), await entered.decode(list(worst.before)))
                    for worst, _ in report.worst
                ]
        return report, texts

    report, texts = common.run_async(work())
    found = report.to_json(texts)
    if as_json:
        common.print_json(found)
    else:
        _print(found)
    if report.grades["rejected"]:
        raise typer.Exit(1)


def _said(report: AuditReport) -> str:
    rate = report.scored.tokens / report.seconds if report.seconds else 0.0
    return f"{report.all.traces} traces, {report.grades['rejected']} rejected, {rate:,.0f} tokens/s"


def _print(found: Json) -> None:
    say = common.out.print
    engine = found["engine"]
    version = engine["policy_version"] or "unknown"
    say(f"against {engine['engine']} {engine['version']}, {engine['model']}, policy {version}", highlight=False)
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "traces", "tokens", "max |diff|", "mean |diff|"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    rows = [("all", found)]
    rows += [(f"harness {name}", row) for name, row in sorted(found["by_harness"].items())]
    rows += [(f"policy version {name}", row) for name, row in sorted(found["by_policy_version"].items())]
    for name, row in rows:
        figures = [_figure(row["max_abs_diff"]), _figure(row["mean_abs_diff"])]
        table.add_row(escape(name), str(row["traces"]), str(row["tokens"]), *figures)
    say(table)
    for title, counts in (
        ("grades", found["grades"]),
        ("traces not compared", found["skipped"]),
        ("tokens not compared", found["skipped_tokens"]),
        ("findings", found["findings"]),
    ):
        if counts:
            say(f"{title}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())), highlight=False)
    if found["skipped"].get("not_built"):
        say("[dim]traces of `polar serve` sessions are made by `polar build SESSION`[/]", highlight=False)
    if found["worst"]:
        say("\nlargest differences", highlight=False)
    for worst in found["worst"]:
        numbers = f"{worst['recorded']:.4f} recorded, {worst['fresh']:.4f} fresh"
        say(f"  {worst['diff']:.2e}  {numbers}  {worst['call_id']} token {worst['position']}", highlight=False)
        say(f"      [dim]{escape(_line(worst['before']))}[/][bold]{escape(_line(worst['token']))}[/]", highlight=False)
    for trace_id, said in found["rejected"].items():
        say(f"[red]rejected[/] {trace_id}: {escape(said)}", highlight=False)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _line(text: str) -> str:
    """A text in one line, line breaks as the two characters that stand for them."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
