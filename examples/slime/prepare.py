"""slime (or Miles) on recorded groups: writes the file that it loads instead of running rollouts.

    polar run swe-task --instances 8 --samples 4
    polar export --format slime --out samples.jsonl
    python examples/slime/prepare.py samples.jsonl --out rollouts    # writes rollouts/0.pt, prints slime's flags

Sequences of one rollout share its `rollout_id`, so that slime's loss treats them as one; the reward post-processing
counts each rollout once in its group's baseline.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path

import torch

from polar_proxy.export.formats import read_jsonl, slime

FLAGS = """  --load-debug-rollout-data '{out}/{{rollout_id}}.pt' --debug-train-only \\
  --custom-reward-post-process-path polar_proxy.export.formats.slime.reward_post_process \\
  --advantage-estimator grpo --use-tis --global-batch-size {rollouts}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("samples", type=Path, help="written by polar export --format slime")
    parser.add_argument("--out", type=Path, default=Path("rollouts"))
    arguments = parser.parse_args()

    samples = list(read_jsonl(arguments.samples))
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.save(slime.debug_data(samples), arguments.out / "0.pt")

    rollouts = len({sample["rollout_id"] for sample in samples})
    trained = sum(sum(sample["loss_mask"]) for sample in samples if not sample["remove_sample"])
    print(f"{len(samples)} samples of {rollouts} rollouts, {trained} trained tokens: {arguments.out / '0.pt'}")
    for name in ("slime", "miles"):
        if importlib.util.find_spec(name) is not None:
            kind = importlib.import_module(f"{name}.utils.types").Sample
            loaded = [kind.from_dict(one) for one in torch.load(arguments.out / "0.pt", weights_only=False)["samples"]]
            print(f"{name} reads {len(loaded)}, {sum(one.effective_response_length for one in loaded)} of the mask")
    print(FLAGS.format(out=arguments.out, rollouts=rollouts))


if __name__ == "__main__":
    main()
