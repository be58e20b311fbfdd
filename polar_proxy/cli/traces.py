"""`polar build`: training sequences from recorded calls, again and otherwise."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.errors import UsageError
from polar_proxy.types import Json


def build(
    idents: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLLOUT|SESSION]...", help="Ids, as listed.", show_default=False)
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Conditions on rollouts, such as 'reward>=1 and status=done'.")
    ] = None,
    builder: Annotated[str, typer.Option(help="merged, per_call or tree.")] = "merged",
    on_drift: Annotated[
        str, typer.Option(help="merged: what becomes of a drifted turn: split, canonical or rescore.")
    ] = "split",
    engine: Annotated[str | None, typer.Option(help="For rescore: local, vllm, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the traces of rollouts and sessions from their recorded calls, in place of what the builder made before.

    The calls stay as they are, so any other builder can be used later. With neither ids nor --where: of everything.
    """
    from polar_proxy.traces.operations import RebuildReport, find_targets, rebuild

    if idents and where is not None:
        raise UsageError("Conditions choose rollouts: give either ids or --where.")
    if on_drift == "rescore" and engine is None:
        raise UsageError("--on-drift rescore asks an engine: name it with --engine.")
    settings = common.load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work() -> RebuildReport:
        async with common.reader(settings) as store:
            sessions = []
            for ident in idents or ():
                rollout = await store.rollouts.get(ident)
                sessions.append(ident if rollout is None else rollout.session_id or ident)
            targets = await find_targets(store, where=where, session_ids=sessions)
            if on_drift != "rescore":
                return await rebuild(store, targets, builder=builder, on_drift=on_drift)
            from polar_proxy.engines.factory import make_engine

            async with make_engine(settings.engine) as entered:
                return await rebuild(store, targets, builder=builder, on_drift=on_drift, engine=entered)

    found = common.run_async(work()).to_json()
    if as_json:
        common.print_json({"builder": builder, "on_drift": on_drift if builder == "merged" else None, **found})
    else:
        _print(found)


def _print(found: Json) -> None:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in (
        "session",
        "rollout",
        "calls",
        "trained",
        "excluded",
        "traces",
        "tokens",
        "sampled",
        "grades",
        "drift",
    ):
        text = name in ("session", "rollout", "excluded", "grades", "drift")
        table.add_column(name, justify="left" if text else "right", no_wrap=name in ("session", "rollout"))
    for row in found["sessions"]:
        calls = row["calls"]
        table.add_row(
            row["session_id"],
            row["rollout_id"] or "-",
            str(calls["recorded"]),
            str(calls["trained"]),
            _counts(calls["excluded"]),
            *(str(row[name]) for name in ("traces", "tokens", "trained_tokens")),
            _counts(row["grades"]),
            _counts(row["drift"]),
        )
    common.out.print(table)
    if found["skipped"]:
        still = _counts(Counter(found["skipped"].values()))
        common.err.print(f"left out, because they still run: {still}", highlight=False)


def _counts(counts: Json) -> str:
    return escape(", ".join(f"{count} {name}" for name, count in sorted(counts.items()))) or "-"
