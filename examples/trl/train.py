"""TRL's GRPOTrainer on groups that Polar recorded.

    polar run swe-task --instances 2 --samples 4
    polar export --format tokens-jsonl --out rows.jsonl
    pip install trl==1.16.0
    python examples/trl/train.py rows.jsonl --steps 2

The rollouts are Polar's: `rollout_func` returns a recorded group for each prompt of the dataset, with its tokens, masks
and log-probabilities, and the reward is that of Polar's evaluators. Baseline, loss and optimiser are TRL's;
`recorded_ratios` makes it compute importance ratios with the recorded log-probabilities.
docs/guide/data.md has the same from a server's feed, and compares it with AsyncGRPOTrainer, which trains every sequence
of a rollout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polar_proxy.export.formats import groups_of, read_jsonl
from polar_proxy.export.formats.trl import RecordedRollouts, recorded_ratios, recorded_reward

POLAR_TINY = Path(__file__).resolve().parents[2] / "polar_proxy" / "assets" / "polar_tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="written by polar export --format tokens-jsonl")
    parser.add_argument("--model", type=Path, default=POLAR_TINY, help="the weights that sampled the rows")
    parser.add_argument("--generations", type=int, default=4, help="rollouts per group")
    parser.add_argument("--steps", type=int, default=1, help="steps of one group each")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    arguments = parser.parse_args()

    # A rollout may have several sequences (a side call, a compacted history), of which GRPOTrainer trains one.
    rollouts = RecordedRollouts(groups_of(read_jsonl(arguments.rows)), several="longest", on_refused="skip")
    trainer = recorded_ratios(GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        train_dataset=Dataset.from_list([{"prompt": "recorded"}] * arguments.steps),
        rollout_func=rollouts,
        reward_funcs=recorded_reward,
        args=GRPOConfig(
            output_dir=str(arguments.out),
            per_device_train_batch_size=arguments.generations,
            num_generations=arguments.generations,
            max_steps=arguments.steps,
            learning_rate=1e-5,
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
    )
    trainer.train()
    for line in trainer.state.log_history[: arguments.steps]:
        names = ("loss", "reward", "reward_std", "grad_norm", "entropy", "clip_ratio/region_mean")
        print(", ".join(f"{name} {line[name]:.4g}" for name in names if name in line))
    print(f"left out: {dict(rollouts.left_out) or 'nothing'}; model in {arguments.out}")


if __name__ == "__main__":
    main()
