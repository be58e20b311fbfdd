"""A custom trainer on Polar's feed in one page: lease groups, read their rows, take a step, acknowledge.

    polar serve --rollout-workers 2 &
    polar submit swe-task --instances 4 --samples 4 --for-training
    python examples/trainer_over_http/train.py --steps 2

It uses only `polar_proxy.client`. The step is a minimal one: group-centred rewards times the importance ratio to the
*recorded* log-probabilities, on the sampled tokens. Replace it by your own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from polar_proxy.api_models import LeaseRequest
from polar_proxy.client import Client, LeaseLostError

POLAR_TINY = Path(__file__).resolve().parents[2] / "polar_proxy" / "assets" / "polar_tiny"


def advantages(polar: Client, group_id: str) -> dict[str, float]:
    """Return the reward of each trained rollout minus the mean of its group.

    The mean includes rollouts without a trace and masked or incomplete ones, which are not trained; rollouts without a
    reward are not included.
    """
    rollouts = polar.group(group_id).rollouts
    rewards = {rollout.rollout_id: rollout.reward for rollout in rollouts if rollout.reward is not None}
    mean = sum(rewards.values()) / max(1, len(rewards))
    trained = {rollout.rollout_id for rollout in rollouts if not (rollout.masked or rollout.incomplete)}
    return {name: reward - mean for name, reward in rewards.items() if name in trained}


def losses(model: Any, rows: Iterator[dict[str, Any]], values: dict[str, float]) -> Iterator[torch.Tensor]:
    """Yield one loss per row (a training sequence). `logprobs` is null at tokens that were not sampled.

    The spans tile the row's tokens. A sampled span names the temperature at which its tokens were sampled, and its
    log-probabilities are those of that temperature.
    """
    for row in rows:
        if row["rollout_id"] not in values:
            continue
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
        old_logprobs = torch.tensor([value or 0.0 for value in row["logprobs"]])
        temperatures = [s.get("temperature", 1.0) for s in row["spans"] for _ in range(s["start"], s["end"])]
        logits = model(ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1]
        logits = logits.float() / torch.tensor(temperatures)[-len(mask) :, None]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[-len(mask) :, None])[:, 0]
        ratio = (logprobs - old_logprobs)[mask].exp()
        yield -(ratio * values[row["rollout_id"]]).sum()


def train(polar: Client, folder: Path, steps: int, groups: int, wait: float = 60.0) -> Any:
    """Train `steps` steps of one to `groups` groups each, and return the model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(steps):
        # No other consumer gets these groups for ten minutes. If you also send weights to the engine, add
        # policy_version=str(step), max_staleness=2: older groups are then dropped and listed in `dropped`.
        request = LeaseRequest(consumer="example", limit=groups, seconds=600, wait=wait)
        while not (leases := polar.lease(request).leases):
            print("no finished groups yet", flush=True)
        optimiser.zero_grad()
        sequences = 0
        for lease in leases:
            values = advantages(polar, lease.group_id)
            for loss in losses(model, polar.group_trajectories(lease.group_id), values):
                loss.backward()
                sequences += 1
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 0 if the rewards of each group are equal
        optimiser.step()
        # Save a checkpoint here: acknowledged groups never come again, the others do when their lease expires.
        for lease in leases:
            try:
                polar.acknowledge(lease.lease_id)
            except LeaseLostError as error:
                print(f"{error}: it will be trained again")
        print(f"step {step}: {len(leases)} groups, {sequences} sequences, gradient {norm:.3g}", flush=True)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8399")
    parser.add_argument("--model", type=Path, default=POLAR_TINY)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    arguments = parser.parse_args()
    home = Path(os.environ.get("POLAR_HOME", "~/.polar")).expanduser()
    key = os.environ.get("POLAR_API_KEY") or (home / "api-key").read_text().strip()
    with Client(arguments.url, key) as client:
        train(client, arguments.model, arguments.steps, arguments.groups)
