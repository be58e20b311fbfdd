"""Cost of a training step in three layouts: sequences of the builder per_call, of merged, and of merged as trees.

    polar run swe-task --instances 3 --samples 16 --harness mini-swe-agent --db groups.db
    python benchmarks/tree_packing.py --db groups.db --json     # each finished group of the database
    python benchmarks/tree_packing.py --made-up 16              # a made-up group of long conversations
    python benchmarks/tree_packing.py --made-up 16 --shape 0.5b --device cuda --dtype bfloat16 --budget 16384

All three train the same sampled tokens with the same loss, so their gradients must agree: `gradient_gap` is the largest
difference from that of per_call, as a share of the largest gradient. `seconds` is the median wall time of a step
(forward, backward, update), `cpu_seconds` its processor time. Each layout runs in a separate process; `peak_mb` is
the resident memory that its steps added; on a GPU, the memory that they needed beside weights and optimiser. `--count`
only counts tokens and pairs, and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
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
from polar_proxy.training.batch import BatchPlan, TrainingBatch, TrainingSequence, make_batch
from polar_proxy.training.config import BuilderName, GrpoConfig, make_config
from polar_proxy.training.feed import StoreGroupReader
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.policy.packing import Pack, pack_trees
from polar_proxy.training.policy.tree import Ids
from tests.training.tree_factories import unshared_tree

LAYOUTS = ("per_call", "merged", "tree")
CONFIG = make_config(
    {
        # The layouts split rollouts into different numbers of sequences, but train the same tokens. In this loss no
        # token's gradient is clipped away, so the gradients of all trained tokens are compared.
        "loss": "cispo",
        "keep_zero_variance_groups": True,
        # The whole step is computed, but the weights hardly move.
        "learning_rate": 1e-30,
        "max_grad_norm": 1e30,
    }
)


class FlatLearner(Learner):
    """A learner without prefix sharing."""

    def _pack(self, sequences: Sequence[Ids]) -> list[Pack]:
        return pack_flat(sequences, self._config.max_tokens_per_microbatch)


@dataclass(frozen=True)
class Measurement:
    """The arguments of `measure`: one layout of one group."""

    layout: str
    sequences: tuple[TrainingSequence, ...]
    model: Path
    config: GrpoConfig
    threads: int
    repeat: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="database with finished groups")
    parser.add_argument(
        "--made-up", type=int, metavar="ROLLOUTS", help="instead of --db: make up a group of N rollouts"
    )
    parser.add_argument("--turns", type=int, default=6, help="made-up group: calls of a rollout")
    parser.add_argument(
        "--system", type=int, default=800, help="made-up group: tokens of system prompt, tools and task"
    )
    parser.add_argument("--answer", type=int, default=35, help="made-up group: sampled tokens per call")
    parser.add_argument("--observation", type=int, default=65, help="made-up group: tokens between two calls")
    parser.add_argument("--model", type=Path, default=POLAR_TINY)
    parser.add_argument(
        "--shape", choices=("0.5b",), help="instead of --model: random weights in the shape of Qwen2.5-0.5B"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--budget", type=int, default=CONFIG.max_tokens_per_microbatch, help="tokens of one forward pass"
    )
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=2, help="measured steps, after one for warming up")
    parser.add_argument("--count", action="store_true", help="only count, measure nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (arguments.db is None) == (arguments.made_up is None):
        parser.error("give --db or --made-up")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            arguments.model = save_random_policy(Path(folder) / arguments.shape)
        report = make_report(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("| group | layout | sequences | tokens | pairs | step, s | processor, s | peak, MB | gradient gap |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in table_rows(report["groups"]):
            print(row)


def make_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the setting, and the measurements of each group. Raises SystemExit if there is no group to measure."""
    groups = asyncio.run(recorded_groups(arguments.db)) if arguments.db else [("made-up", made_up_group(arguments))]
    report = {
        "setting": {
            "model": arguments.model.name,
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "dtype": arguments.dtype,
            "activation_checkpointing": arguments.activation_checkpointing,
            "threads": arguments.threads,
            "max_tokens_per_microbatch": arguments.budget,
            "torch": torch.__version__,
        },
        "groups": [
            {
                "group": name,
                "rollouts": len({sequence.rollout for sequence in layouts["tree"]}),
                **compare(layouts, arguments),
            }
            for name, layouts in groups
            if layouts
        ],
    }
    if not report["groups"]:
        raise SystemExit(f"{arguments.db} has no finished group with a sampled token")
    return report


def save_random_policy(folder: Path) -> Path:
    """Save a model with random weights in the shape of Qwen2.5-0.5B (0.49 billion weights), without a tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def compare(layouts: dict[str, tuple[TrainingSequence, ...]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return counts and measurements of each layout, and their ratios to the tree's."""
    rows = {layout: count(layout, sequences, arguments.budget) for layout, sequences in layouts.items()}
    if not arguments.count:
        config = CONFIG.model_copy(
            update={
                "max_tokens_per_microbatch": arguments.budget,
                "max_sequence_length": arguments.budget,
                "device": arguments.device,
                "dtype": arguments.dtype,
                "activation_checkpointing": arguments.activation_checkpointing,
            }
        )
        reference: dict[str, torch.Tensor] | None = None
        for layout, sequences in layouts.items():
            work = Measurement(layout, sequences, arguments.model, config, arguments.threads, arguments.repeat)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                measurements, gradients = pool.submit(measure, work).result()
            reference = gradients if reference is None else reference
            rows[layout] |= measurements | {"gradient_gap": gradient_gap(reference, gradients)}
            print(f"{layout}: {rows[layout]}", file=sys.stderr, flush=True)
    names = ("sequences", "tokens", "pairs", "seconds", "cpu_seconds")
    ratios = {
        layout: {name: round(rows[layout][name] / rows["tree"][name], 2) for name in names if name in rows[layout]}
        for layout in ("per_call", "merged")
    }
    return {"layouts": rows, "times_the_tree": ratios}


def count(layout: str, sequences: Sequence[TrainingSequence], budget: int) -> dict[str, Any]:
    ids = [sequence.token_ids for sequence in sequences]
    packs = pack_trees(ids, budget) if layout == "tree" else pack_flat(ids, budget)
    return {
        "sequences": len(sequences),
        "tokens": sum(len(pack.tree) for pack in packs),
        # Attention compares a node at depth d with d + 1 nodes.
        "pairs": sum(int((pack.tree.positions + 1).sum()) for pack in packs),
        "trained_tokens": sum(int(sequence.trained.sum()) for sequence in sequences),
        "microbatches": len(packs),
    }


def measure(work: Measurement) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return median times and peak memory of steps, and the gradient."""
    torch.set_num_threads(work.threads)
    device = work.config.device
    learner = (Learner if work.layout == "tree" else FlatLearner)(load_model(work.model, device), work.config)
    batch = TrainingBatch(work.sequences, ("group",), (), BatchPlan(()))
    wall, cpu = [], []
    before = memory_mb(device)
    for step in range(work.repeat + 1):
        if device == "cuda" and step == 1:  # the optimiser's state exists now
            before = torch.cuda.memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
        started, cpu_started = time.perf_counter(), time.process_time()
        learner.update(batch, 0)  # reads the loss, so it returns after the GPU's work
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    peak = memory_mb(device)
    gradients = {name: one.grad.cpu() for name, one in learner.model.named_parameters() if one.grad is not None}
    return {
        "seconds": statistics.median(wall[1:] or wall),
        "cpu_seconds": statistics.median(cpu[1:] or cpu),
        "first_seconds": wall[0],
        "peak_mb": peak - before,
    }, gradients


def memory_mb(device: str) -> float:
    """Return the largest memory used until now, MiB: of the GPU by tensors, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gradient_gap(reference: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two gradients as a share of the largest value of `reference`.

    Raises SystemExit if they cannot be compared: `reference` is zero, or the parameters differ.
    """
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    if reference.keys() != gradients.keys() or not largest > 0:
        raise SystemExit("the layouts have no common gradient")
    return max(float((gradients[name] - tensor).abs().max()) for name, tensor in reference.items()) / largest


def pack_flat(sequences: Sequence[Ids], max_tokens: int) -> list[Pack]:
    """Return packs without prefix sharing: first fit, longest first."""
    packs: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        length = len(sequences[index])
        target = next((pack for pack, left in enumerate(free) if length <= left), len(packs))
        if target == len(packs):
            packs.append([])
            free.append(max_tokens)
        packs[target].append(index)
        free[target] -= length
    return [Pack(unshared_tree([sequences[index] for index in members]), tuple(members)) for members in packs]


# Groups


async def recorded_groups(db: str) -> list[tuple[str, dict[str, tuple[TrainingSequence, ...]]]]:
    """Return name and layouts of every finished group of the database; no layouts if nothing can be trained."""
    groups = []
    async with open_store(db) as store:
        reader = StoreGroupReader(store)
        rows = await store.rollouts.find()
        unfinished = {row.group_id for row in rows if row.status not in ("done", "failed", "timed_out")}
        for group_id in dict.fromkeys(row.group_id for row in rows if row.group_id not in unfinished):
            layouts = {}
            builders: tuple[BuilderName, ...] = ("per_call", "merged", "tree")
            for builder in builders:
                group = await reader.read_group(group_id, builder, None)
                batch = make_batch([group], CONFIG)
                if batch.plan.skipped:
                    print(f"{group_id}, {builder}: skipped: {batch.plan.skipped_json()}", file=sys.stderr)
                layouts[builder] = tuple(replace(one, advantage=advantage(one.rollout)) for one in batch.sequences)
            if len({sum(int(one.trained.sum()) for one in layouts[layout]) for layout in LAYOUTS}) != 1:
                raise SystemExit(f"{group_id}: the builders do not train the same tokens")
            groups.append((f"{group.task_id} {group_id}", layouts if layouts["tree"] else {}))
    return groups


def made_up_group(arguments: argparse.Namespace) -> dict[str, tuple[TrainingSequence, ...]]:
    """Return the layouts of a group of conversations with random ids after a shared prompt. A turn is an answer and an
    observation."""
    random = np.random.default_rng(0)
    vocab_size = int(json.loads((arguments.model / "config.json").read_text())["vocab_size"])
    prompt = random.integers(0, vocab_size, arguments.system)
    per_call, merged = [], []
    for rollout in range(arguments.made_up):
        ids, trained = prompt, np.zeros(len(prompt), dtype=bool)
        for turn in range(arguments.turns):
            if turn:
                ids = np.concatenate([ids, random.integers(0, vocab_size, arguments.observation)])
                trained = np.concatenate([trained, np.zeros(arguments.observation, dtype=bool)])
            own = np.concatenate([np.zeros(len(ids), dtype=bool), np.ones(arguments.answer, dtype=bool)])
            ids = np.concatenate([ids, random.integers(0, vocab_size, arguments.answer)])
            trained = np.concatenate([trained, own[len(trained) :]])
            per_call.append(make_sequence(rollout, turn, ids, own))
        merged.append(make_sequence(rollout, 0, ids, trained))
    return {"per_call": tuple(per_call), "merged": tuple(merged), "tree": tuple(merged)}


def make_sequence(rollout: int, turn: int, ids: Ids, trained: Any) -> TrainingSequence:
    old_logprobs = np.where(trained, -7.0, np.nan)
    name = f"{rollout}/{turn}"
    return TrainingSequence(
        trace_id=name,
        group_id="group",
        rollout=rollout,
        token_ids=ids,
        trained=trained,
        old_logprobs=old_logprobs,
        advantage=advantage(rollout),
        observed=~trained,
        temperatures=np.ones(len(ids)),
        versions=np.full(len(ids), None, dtype=object),
        group_size=1,
    )


def advantage(rollout: int) -> float:
    """Return a fixed advantage other than 0, so that groups with equal rewards also have a gradient to compare."""
    return float(np.random.default_rng(rollout).choice([-1.0, 1.0]) * (1.0 + rollout / 16))


def table_rows(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        for layout, row in group["layouts"].items():
            times = [f"{row[name]:.2f}" if name in row else "-" for name in ("seconds", "cpu_seconds")]
            memory = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
            gap = f"{row['gradient_gap']:.1e}" if "gradient_gap" in row else "-"
            counts = f"{row['sequences']} | {row['tokens']:,} | {row['pairs'] / 1e6:.1f} M"
            yield f"| {group['group'].split()[0]} | {layout} | {counts} | {' | '.join(times)} | {memory} | {gap} |"


if __name__ == "__main__":
    main()
