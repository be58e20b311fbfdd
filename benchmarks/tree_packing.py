"""What a training step computes, and how long it takes, with the sequences of per_call, of merged, and as a tree.

    polar run swe-task --instances 3 --samples 16 --harness mini-swe-agent --db groups.db
    python benchmarks/tree_packing.py --db groups.db --json     # each group that was finished there
    python benchmarks/tree_packing.py --made-up 16              # a group of long conversations, made up

The three train the same sampled tokens to the same loss, so their gradients must be one: `gradient_gap` is the largest
difference from per_call's, as a share of the largest gradient. `seconds` is the median of a step's wall time (forward,
backward, update), `cpu_seconds` of its processor time. Each way runs in a process of its own; `peak_mb` is what the
steps added to its resident memory at most. `--count` counts tokens and pairs only, and takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.store import open_store
from polar_proxy.training.batch import TrainingBatch, TrainingSequence, make_batch
from polar_proxy.training.config import BuilderName, make_config
from polar_proxy.training.model import Learner, load_model
from polar_proxy.training.packing import Pack, pack_flat, pack_trees, tree_cost
from polar_proxy.training.reading import StoreGroupReader
from polar_proxy.training.tree import Ids

WAYS = ("per_call", "merged", "tree")
CONFIG = make_config(
    {
        # A loss whose gradient no clip takes away: every trained token is compared.
        "loss": "cispo",
        "keep_zero_variance_groups": True,
        # The step is made whole, and leaves the weights where they are.
        "learning_rate": 1e-30,
        "max_grad_norm": 1e30,
    }
)


class Flat(Learner):
    """A learner that shares nothing: what is computed without trees."""

    def _packs(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_flat(sequences, self._config.max_tokens_per_microbatch)


@dataclass(frozen=True)
class Work:
    """One way of one group."""

    way: str
    sequences: tuple[TrainingSequence, ...]
    model: Path
    budget: int
    threads: int
    repeat: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="database with finished groups")
    parser.add_argument("--made-up", type=int, metavar="ROLLOUTS", help="instead: a made-up group of so many rollouts")
    parser.add_argument("--turns", type=int, default=10, help="made up: calls of a rollout")
    parser.add_argument("--system", type=int, default=2000, help="made up: tokens of system prompt, tools and task")
    parser.add_argument("--answer", type=int, default=35, help="made up: tokens sampled a call")
    parser.add_argument("--observation", type=int, default=65, help="made up: tokens that come between two calls")
    parser.add_argument("--model", type=Path, default=POLAR_TINY)
    parser.add_argument("--budget", type=int, default=CONFIG.max_tokens_per_microbatch, help="tokens of a forward pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=3, help="steps measured, behind one that warms up")
    parser.add_argument("--count", action="store_true", help="count only, measure nothing")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if (given.db is None) == (given.made_up is None):
        parser.error("give --db or --made-up")
    groups = asyncio.run(recorded(given.db)) if given.db else [("made-up", made_up(given))]
    told = {
        "setting": {
            "model": given.model.name,
            "threads": given.threads,
            "max_tokens_per_microbatch": given.budget,
            "torch": torch.__version__,
        },
        "groups": [
            {"group": name, "rollouts": rollouts_of(ways), **compared(ways, given)} for name, ways in groups if ways
        ],
    }
    if not told["groups"]:
        raise SystemExit(f"{given.db} has no finished group with a sampled token")
    if given.json:
        print(json.dumps(told, indent=2))
    else:
        table(told["groups"])


def compared(ways: dict[str, tuple[TrainingSequence, ...]], given: argparse.Namespace) -> dict[str, Any]:
    """Counts and measurements of each way, and how many times more than the tree the others take."""
    rows = {way: counted(way, sequences, given.budget) for way, sequences in ways.items()}
    if not given.count:
        wanted: dict[str, torch.Tensor] | None = None
        for way, sequences in ways.items():
            work = Work(way, sequences, given.model, given.budget, given.threads, given.repeat)
            measurements, gradients = apart(work)
            wanted = gradients if wanted is None else wanted
            rows[way] |= measurements | {"gradient_gap": gap(wanted, gradients)}
            print(f"{way}: {rows[way]}", file=sys.stderr, flush=True)
    names = ("sequences", "tokens", "pairs", "seconds", "cpu_seconds")
    times = {
        way: {name: round(rows[way][name] / rows["tree"][name], 2) for name in names if name in rows[way]}
        for way in ("per_call", "merged")
    }
    return {"ways": rows, "times_the_tree": times}


def counted(way: str, sequences: Sequence[TrainingSequence], budget: int) -> dict[str, Any]:
    ids = [sequence.token_ids for sequence in sequences]
    packs = pack_trees(ids, budget) if way == "tree" else pack_flat(ids, budget)
    costs = [tree_cost(pack.tree) for pack in packs]
    return {
        "sequences": len(sequences),
        "tokens": sum(cost.tokens for cost in costs),
        "pairs": sum(cost.pairs for cost in costs),
        "trained_tokens": sum(int(sequence.trained.sum()) for sequence in sequences),
        "passes": len(packs),
    }


def apart(work: Work) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, work).result()


def measured(work: Work) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Median times and peak memory of steps, and the gradient."""
    torch.set_num_threads(work.threads)
    config = CONFIG.model_copy(update={"max_tokens_per_microbatch": work.budget, "max_sequence": work.budget})
    learner = (Learner if work.way == "tree" else Flat)(load_model(work.model), config)
    batch = TrainingBatch(work.sequences, ("group",), (), 0, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = [], []
    for _ in range(work.repeat + 1):
        began, busy = time.perf_counter(), time.process_time()
        learner.update(batch, 0)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradients = {name: one.grad.clone() for name, one in learner.model.named_parameters() if one.grad is not None}
    return {
        "seconds": statistics.median(wall[1:] or wall),
        "cpu_seconds": statistics.median(cpu[1:] or cpu),
        "peak_mb": (after - before) / 1024,
    }, gradients


def gap(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """Raises SystemExit where there is nothing to compare: no gradient, or other parameters."""
    largest = max(float(one.abs().max()) for one in wanted.values())
    if wanted.keys() != found.keys() or not largest > 0:
        raise SystemExit("the ways have no common gradient")
    return max(float((found[name] - one).abs().max()) for name, one in wanted.items()) / largest


# Groups


async def recorded(db: str) -> list[tuple[str, dict[str, tuple[TrainingSequence, ...]]]]:
    """Every group of the database: its name and the sequences of each way; none where nothing can be trained."""
    found = []
    async with open_store(db) as store:
        reader = StoreGroupReader(store)
        rows = await store.rollouts.find()
        unfinished = {row.group_id for row in rows if row.status not in ("done", "failed", "timed_out")}
        for group_id in dict.fromkeys(row.group_id for row in rows if row.group_id not in unfinished):
            ways = {}
            builders: tuple[BuilderName, ...] = ("per_call", "merged", "tree")
            for builder in builders:
                group = await reader.read_group(group_id, builder, None)
                batch = make_batch([group], CONFIG)
                if batch.left_out:
                    print(f"{group_id}, {builder}: left out: {batch.left_out_json()}", file=sys.stderr)
                ways[builder] = tuple(replace(one, advantage=advantage(one.rollout)) for one in batch.sequences)
            if len({sum(int(one.trained.sum()) for one in ways[way]) for way in WAYS}) != 1:
                raise SystemExit(f"{group_id}: the builders do not train the same tokens")
            found.append((f"{group.task_id} {group_id}", ways if ways["tree"] else {}))
    return found


def made_up(given: argparse.Namespace) -> dict[str, tuple[TrainingSequence, ...]]:
    """Conversations of random ids behind one prompt, each turn an answer and an observation; no two answers alike."""
    random = np.random.default_rng(0)
    vocabulary = int(json.loads((given.model / "config.json").read_text())["vocab_size"])

    def some(count: int) -> Ids:
        return random.integers(0, vocabulary, count)

    prompt = some(given.system)
    per_call, merged = [], []
    for rollout in range(given.made_up):
        ids, trained = prompt, np.zeros(len(prompt), dtype=bool)
        for turn in range(given.turns):
            if turn:
                ids = np.concatenate([ids, some(given.observation)])
                trained = np.concatenate([trained, np.zeros(given.observation, dtype=bool)])
            own = np.concatenate([np.zeros(len(ids), dtype=bool), np.ones(given.answer, dtype=bool)])
            ids = np.concatenate([ids, some(given.answer)])
            trained = np.concatenate([trained, own[len(trained) :]])
            per_call.append(sequence(rollout, turn, ids, own))
        merged.append(sequence(rollout, 0, ids, trained))
    return {"per_call": tuple(per_call), "merged": tuple(merged), "tree": tuple(merged)}


def sequence(rollout: int, turn: int, ids: Ids, trained: Any) -> TrainingSequence:
    recorded_at = np.where(trained, -7.0, np.nan)
    return TrainingSequence(
        f"{rollout}/{turn}", "group", rollout, ids, trained, recorded_at, advantage(rollout), ~trained
    )


def advantage(rollout: int) -> float:
    """Of a rollout: fixed and never 0, so that groups whose rewards are all alike have a gradient to compare."""
    return float(np.random.default_rng(rollout).choice([-1.0, 1.0]) * (1.0 + rollout / 16))


def rollouts_of(ways: dict[str, tuple[TrainingSequence, ...]]) -> int:
    return len({one.rollout for one in ways["tree"]})


# Output


def table(groups: Sequence[dict[str, Any]]) -> None:
    print("| group | way | sequences | tokens | pairs | step, s | processor, s | peak, MB | gradient gap |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines(groups):
        print(line)


def lines(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        for way, row in group["ways"].items():
            times = [f"{row[name]:.2f}" if name in row else "-" for name in ("seconds", "cpu_seconds")]
            memory = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
            difference = f"{row['gradient_gap']:.1e}" if "gradient_gap" in row else "-"
            counts = f"{row['sequences']} | {row['tokens']:,} | {row['pairs'] / 1e6:.1f} M"
            yield f"| {group['group'].split()[0]} | {way} | {counts} | {' | '.join(times)} | {memory} | {difference} |"


if __name__ == "__main__":
    main()
