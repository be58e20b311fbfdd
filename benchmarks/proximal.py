"""Cost and error of the four ways to obtain the proximal policy (setting `proximal`), on a step with stale tokens.

    python benchmarks/proximal.py --json

The initial weights sample a generated group. The trainer takes `--stale` steps on it, so that in the last step every
token is that many policy versions old. `step_seconds` is the wall time of that step, `recompute_seconds` its part for
forward passes with older weights, and `error` the mean |log pi_prox - log pi_sampler| in nats, where pi_sampler is the
trainer's own model with the weights that sampled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.training.batch import BatchPlan, TrainingBatch, TrainingSequence
from polar_proxy.training.config import make_config
from polar_proxy.training.policy import checkpoint
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.step_stats import StepStats

FORMS = ("sampler", "start", "recorded", "interpolated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=300, help="tokens that all rollouts share")
    parser.add_argument("--answer", type=int, default=100, help="sampled tokens of a rollout")
    parser.add_argument("--stale", type=int, default=3, help="policy versions by which the tokens are stale")
    parser.add_argument("--noise", type=float, default=0.02, help="mismatch of engine and trainer, nats")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    batch, exact = stale_batch(arguments)
    rows = {form: measure(form, batch, exact, arguments) for form in FORMS}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| proximal | step, s | of it older weights, s | error, nats |")
    print("|---|---|---|---|")
    for form, row in rows.items():
        print(f"| {form} | {row['step_seconds']:.2f} | {row['recompute_seconds']:.2f} | {row['error']:.4f} |")


def stale_batch(arguments: argparse.Namespace) -> tuple[TrainingBatch, list[np.ndarray[Any, Any]]]:
    """Return a batch whose recorded log-probabilities are those of the initial weights plus noise, and the
    log-probabilities without noise, one array for each sequence."""
    random = np.random.default_rng(0)
    learner = Learner(load_model(POLAR_TINY), make_config({}))
    prompt = random.integers(0, learner.vocab_size, arguments.prompt)
    n = arguments.prompt + arguments.answer
    trained = np.arange(n) >= arguments.prompt
    sequences, exact = [], []
    for rollout in range(arguments.rollouts):
        ids = np.concatenate([prompt, random.integers(0, learner.vocab_size, arguments.answer)])
        values = np.array([np.nan, *learner.logprobs(ids.tolist())])
        exact.append(values)
        sequences.append(
            TrainingSequence(
                trace_id=str(rollout),
                group_id="group",
                rollout=rollout,
                token_ids=ids,
                trained=trained,
                old_logprobs=np.where(trained, values + random.normal(0, arguments.noise, n), np.nan),
                advantage=1.0 if rollout % 2 else -1.0,
                observed=np.zeros(n, dtype=bool),
                temperatures=np.ones(n),
                versions=np.where(trained, "0", None),
                group_size=arguments.rollouts,
            )
        )
    return TrainingBatch(tuple(sequences), ("group",), (), BatchPlan(())), exact


def measure(
    form: str, batch: TrainingBatch, exact: list[np.ndarray[Any, Any]], arguments: argparse.Namespace
) -> dict[str, float]:
    config = make_config(
        {
            "loss": "decoupled",
            "proximal": form,
            "max_async_steps": arguments.stale,
            "learning_rate": arguments.learning_rate,
        }
    )
    learner = Learner(load_model(POLAR_TINY), config)
    with tempfile.TemporaryDirectory() as folder:
        kept = partial(checkpoint.weights_after, Path(folder), initial=POLAR_TINY, adapter=False)
        for step in range(arguments.stale):
            learner.update(batch, step, kept)
            state = TrainerState(step + 1, step + 1, str(step + 1), ())
            checkpoint.save(Path(folder), state, learner.weights(), learner.state(), model=POLAR_TINY, keep=1)
        start = [np.array([np.nan, *learner.logprobs(one.token_ids.tolist())]) for one in batch.sequences]
        last: StepStats = learner.update(batch, arguments.stale, kept)
    share = 1.0 / arguments.stale
    errors = []
    for one, own, true in zip(batch.sequences, start, exact, strict=True):
        forms = {
            "sampler": true,
            "start": own,
            "recorded": one.old_logprobs,
            "interpolated": share * one.old_logprobs + (1.0 - share) * own,
        }
        errors.append(np.abs(forms[form] - true)[one.trained].mean())
    error = float(np.mean(errors))
    return {"step_seconds": last.seconds, "recompute_seconds": last.proximal_seconds, "error": error}


if __name__ == "__main__":
    main()
