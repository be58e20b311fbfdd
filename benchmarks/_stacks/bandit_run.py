"""What `benchmarks/resume.py` kills: a whole training run in one process, taken up wherever the last one was killed.

    python -m benchmarks._stacks.bandit_run FOLDER MODEL SEED STEPS

Engine, store, jobs, feed, leases, trainer, checkpoints, weight sync and recovery are Polar's own; only the agent is a
stand-in, one call of a few tokens (`tests/training/bandit.py`). FOLDER/points gets the names of the points of the loop
that are passed, one a line.
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

SEEDS_APART = 1_000_000


def settings(seed: int, steps: int) -> GrpoConfig:
    return CONFIG.model_copy(update={"seed": seed, "steps": steps, "groups": 2, "learning_rate": 1e-3})


async def run(folder: Path, model: Path, seed: int, steps: int) -> None:
    config = settings(seed, steps)
    # So named, a killed process's rollouts are known to be nobody's (rollout/recovery.py).
    worker = f"{socket.gethostname()}:{os.getpid()}:bandit"
    with (folder / "points").open("a", buffering=1) as points:
        async with opened(folder, model) as (store, engine):
            await recover(store)
            bandit = Bandit(
                store, engine, "bandit", config.groups, config.samples, seed=SEEDS_APART * seed, worker=worker
            )
            await trainer(
                folder, model, store, engine, config, rollouts=bandit, on_point=lambda point: print(point, file=points)
            ).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
