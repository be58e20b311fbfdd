"""The summary that `polar run` prints: its rollouts, and commands to continue with."""

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
"""Number of samples that a suggested run takes for each task, unless this run took more."""


def print_run(rows: Sequence[RolloutRow], task: str | None, url: str, db: str | None) -> None:
    """Print the rollouts of a run, and what to do next. `task`: the task that `polar run` was given; None if the run
    repeats a rollout. `db`: the --db that was given, if any."""
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


def next_steps(rows: Sequence[RolloutRow], task: str | None) -> Iterator[tuple[str, str]]:
    """Yield the steps that fit the result of a run, each with its purpose and its command."""
    if not rows:
        return
    rewards = {row.rollout_id: row.reward for row in rows if row.reward is not None}
    if not rewards:
        yield "see what happened", f"polar show {rows[0].rollout_id}"
        return
    best = max(rewards, key=lambda one: rewards[one])
    yield "see the best rollout", f"polar show {best}"
    yield "see it in the browser, down to the token", f"polar view {best}"
    if any(reward >= 1 for reward in rewards.values()):
        export = "polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl"
        yield "write the solved ones as training sequences", export
    if task is not None and _is_bundled(rows[0]):  # the options with which other runs were started are unknown here
        yield _next_run(rows, shlex.quote(task))


def _is_bundled(row: RolloutRow) -> bool:
    """Return whether the rollout ran the bundled policy in mini-swe-agent, the only harness that the policy can use."""
    from polar_proxy.engines.bundled import POLAR_TINY_NAME

    harness = row.harness.partition(" ")[0]  # without its version
    return row.engine.startswith("local ") and (row.model, harness) == (POLAR_TINY_NAME, "mini-swe-agent")


def _next_run(rows: Sequence[RolloutRow], task: str) -> tuple[str, str]:
    """Choose the next run or training by the rewards. Return its purpose and its command."""
    groups: dict[str, list[RolloutRow]] = defaultdict(list)
    for row in rows:
        groups[row.group_id].append(row)
    samples = max(map(len, groups.values()))
    run = f"polar run {task}"
    if samples == 1:
        return "compare several samples of a task", f"{run} --samples {_SAMPLES}"
    if any(len({row.reward for row in group} - {None}) > 1 for group in groups.values()):
        train = f"polar train grpo --task {task} --engine local --steps 2 --samples {samples} --groups 1 --run first"
        return "the rewards of a group differ, so a policy can learn from them; train it", train
    reason = "all rewards of a group are equal, so a policy learns nothing from them"
    seeds = [row.seed for row in rows if row.seed is not None]
    if seeds:
        return f"{reason}; try another task", f"{run} --seed {max(seeds) + 1} --samples {max(_SAMPLES, samples)}"
    return f"{reason}; try more samples", f"{run} --samples {2 * samples}"
