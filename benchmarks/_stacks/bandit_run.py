"""A whole training run in one process, which `benchmarks/resume.py` kills and starts again.

    python -m benchmarks._stacks.bandit_run FOLDER MODEL SEED STEPS

Engine, store, jobs, feed, leases, trainer, checkpoints, weight sync and recovery are Polar's own; only the agent is
replaced by one call of a few tokens (`tests/training/bandit.py`). Whenever the training loop passes one of its named
points, the name is appended to FOLDER/points as a line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import torch

from polar_proxy.rollouts.recovery import recover
from polar_proxy.training.config import GrpoConfig
from tests.training.bandit import CONFIG, Bandit, opened, trainer

SEED_DISTANCE = 1_000_000


def settings(seed: int, steps: int) -> GrpoConfig:
    return CONFIG.model_copy(update={"seed": seed, "steps": steps, "groups": 2, "learning_rate": 1e-3})


async def run(folder: Path, model: Path, seed: int, steps: int) -> None:
    config = settings(seed, steps)
    # With host and process id in the name, recovery recognises the rollouts of a killed process.
    worker = f"{socket.gethostname()}:{os.getpid()}:bandit"
    with (folder / "points").open("a", buffering=1) as points:
        async with opened(folder, model) as (store, engine):
            await recover(store)
            bandit = Bandit(
                store, engine, "bandit", config.groups, config.samples, seed=SEED_DISTANCE * seed, worker=worker
            )
            await trainer(
                folder, model, store, engine, config, rollouts=bandit, on_point=lambda point: print(point, file=points)
            ).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
