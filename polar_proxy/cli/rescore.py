"""`polar rescore`: off-policy rows from runs whose engine told no tokens."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.progress import counting
from polar_proxy.errors import UsageError
from polar_proxy.traces.operations import find_targets, rescore_session
from polar_proxy.types import Json


def rescore(
    where: Annotated[str | None, typer.Option(help="Conditions on rollouts, such as 'engine=openai'.")] = None,
    session: Annotated[list[str] | None, typer.Option(help="Just this session (may be repeated).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest so many rollouts or sessions.")] = None,
    engine: Annotated[str | None, typer.Option(help="Whose tokens: vllm, local, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give recorded text the tokens and log-probabilities of another engine.

    The engine did not sample it: the traces are of the builder `rescored`, graded `approximate`, and exported only by
    `polar export --builder rescored --all-grades`.
    """
    if engine is None:
        raise UsageError("Say whose tokens the answers shall have: --engine vllm --engine-url ..., or --engine local.")
    settings = common.load_settings(db, engine={"kind": engine, "url": engine_url, "model": model})

    async def work() -> Json:
        from polar_proxy.engines.factory import make_engine
        from polar_proxy.traces.rescoring import RescoreReport, require_scoring_engine

        report = RescoreReport()
        async with common.reader(settings) as store:
            targets = await find_targets(store, where=where, session_ids=session or (), limit=limit)
            async with make_engine(settings.engine) as entered:
                require_scoring_engine(entered)
                with counting("rescore", len(targets)) as told:
                    for number, target in enumerate(targets, 1):
                        await rescore_session(store, entered, target, report, at_once=concurrency)
                        told(number, f"{report.answers} answers, {report.scored.tokens:,} tokens scored")
                info = entered.info
        by = {"engine": info.engine, "version": info.version, "model": info.model}
        return {**report.to_json(), "engine": by}

    found = common.run_async(work())
    if as_json:
        common.print_json(found)
        return
    say = common.out.print
    by = found["engine"]
    made = f"{found['answers']} answers of {found['calls']} calls, {found['tokens']} tokens, {found['traces']} traces"
    say(f"rescored by {by['engine']}, {escape(by['model'])}: {made}", highlight=False)
    if found["skipped"]:
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(found["skipped"].items()))
        say(f"calls left out: {left}", highlight=False)
    if found["traces"]:
        say("off-policy, graded approximate: polar export --builder rescored --all-grades", highlight=False)
