"""The end of `polar run`: its rollouts, and what to do next with such a result."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from polar_proxy.cli.output import format_number, make_table, out, styled
from polar_proxy.terminal import one_line

if TYPE_CHECKING:
    from polar_proxy.store import RolloutRow

_SAMPLES = 4
"""Samples of a task that a suggested run takes, unless this run took more."""


def print_run(rows: Sequence[RolloutRow], task: str, url: str, db: str | None) -> None:
    """Print the rollouts of a run of `task`, and what to do next. `db` is the --db that was given, if any."""
    numbers = ("reward", "calls", "trained", "s")
    cells = (
        (
            row.rollout_id,
            row.task_id,
            row.status,
            format_number(row.reward),
            row.calls,
            row.trained_tokens,
            format_number(row.wall_seconds, ".1f"),
        )
        for row in rows
    )
    out.print(make_table(("rollout", "task", "status", *numbers), cells, right=numbers))
    scored = [row.reward for row in rows if row.reward is not None]
    solved = sum(reward >= 1 for reward in scored)
    out.print(f"solved {solved} of {len(scored)} scored rollouts ({len(rows)} in all)")
    for row in rows:
        if row.error:
            out.print(styled("[yellow]{}: {}[/]", row.rollout_id, row.error), soft_wrap=True)
    out.print(f"database: {url}", soft_wrap=True)
    option = "" if db is None else f" --db {shlex.quote(db)}"
    for purpose, command in next_steps(rows, task):
        out.print(f"{one_line(purpose)}:", soft_wrap=True)
        out.print(f"  {one_line(command)}{option}", soft_wrap=True)


def next_steps(rows: Sequence[RolloutRow], task: str) -> Iterator[tuple[str, str]]:
    """Yield the steps that fit the result of a run, each with its purpose and its command."""
    from polar_proxy.engines.bundled import POLAR_TINY_NAME

    if not rows:
        return
    scored = {row.rollout_id: row.reward for row in rows if row.reward is not None}
    if not scored:
        yield "see what happened", f"polar show {rows[0].rollout_id}"
        return
    yield "see the best rollout", f"polar show {max(scored, key=lambda one: scored[one])}"
    if any(reward >= 1 for reward in scored.values()):
        export = "polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl"
        yield "write the solved ones as training sequences", export
    run = f"polar run {shlex.quote(task)}"
    per_group = max(len(values) for values in _rewards_by_group(rows))
    if per_group == 1:
        yield "compare several samples of a task", f"{run} --samples {_SAMPLES}"
    elif all(len(set(values)) == 1 for values in _rewards_by_group(rows)):
        seeds = [row.seed for row in rows if row.seed is not None]
        other = (
            f"--seed {max(seeds) + 1} --samples {max(_SAMPLES, per_group)}" if seeds else f"--samples {2 * per_group}"
        )
        reason = "all rewards of a group are equal, which teaches a policy nothing"
        yield f"{reason}; try {'another task' if seeds else 'more samples'}", f"{run} {other}"
    elif rows[0].engine.startswith("local ") and rows[0].model == POLAR_TINY_NAME:
        train = f"polar train grpo --task {shlex.quote(task)} --engine local --steps 2 --samples {per_group} --groups 1"
        yield "the rewards of a group differ, so a policy can learn from them; train it", f"{train} --run first"


def _rewards_by_group(rows: Sequence[RolloutRow]) -> list[list[float]]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            rewards[row.group_id].append(row.reward)
    return list(rewards.values())
