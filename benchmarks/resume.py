"""A training run killed again and again with SIGKILL, and taken up each time: is anything trained twice, or skipped?

    python benchmarks/resume.py --kills 10 --json

One run a seed is left alone; of some seeds another is killed `--kills` times, at moments drawn over its whole length.
What was trained is told by the feed and by the lines of the run; that nothing else was, by the weights: rollouts are
sampled from fixed seeds, so the weights of the killed run must be those of the run that was left alone. What the
process is: `_stacks/bandit_run.py`. Exit code 1 where a group was trained twice or skipped, or rewards differ by more
than the noise: twice the standard deviation between the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks._stacks.deployed import own_folder
from benchmarks._stacks.stacks import ROOT, StackError, tail
from polar_proxy.engines.local import LocalEngine
from polar_proxy.store import open_store
from polar_proxy.training import checkpoint, metrics
from polar_proxy.types import Sampling, TextRequest
from tests.engines.conftest import make_random_model
from tests.training.bandit import LENGTH, PROMPT, reward_of

HELD_OUT_SEED = 10**9
EARLY = 0.2
"""This share of the kills comes while the process starts and takes the run up."""
PATIENCE = 300.0
"""Seconds without a step, and the run hangs."""


class Run:
    """A run in a folder of its own, by one process after the other."""

    def __init__(self, folder: Path, model: Path, seed: int, steps: int) -> None:
        self.folder, self.run = folder, folder / "run"
        self._arguments = [str(folder), str(model), str(seed), str(steps)]
        folder.mkdir()

    def begin(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "benchmarks._stacks.bandit_run", *self._arguments]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)

    def points(self) -> list[str]:
        """Names of the points of the loop that were passed so far."""
        path = self.folder / "points"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def until(self, process: subprocess.Popen[bytes], enough: int) -> bool:
        """Wait for so many steps to have been synced by any process; False: the run ended first. Raises Unavailable."""
        moved, seen = time.monotonic(), 0
        while (points := self.points()).count("synced") < enough:
            now = len(points)
            if process.poll() is not None:
                if process.returncode:
                    raise StackError(f"the run ended with {process.returncode}: {tail(self.folder / 'log')}")
                return False
            if now != seen:
                moved, seen = time.monotonic(), now
            if time.monotonic() - moved > PATIENCE:
                raise StackError(f"no step for {PATIENCE:g} s: {tail(self.folder / 'log')}")
            time.sleep(0.002)
        return True

    def finish(self) -> tuple[float, float]:
        """Left alone until it ends: seconds until it is in its loop, and of a step."""
        began, process = time.time(), self.begin()
        try:
            self.until(process, 10**9)
        finally:
            process.kill()
            process.wait()
        times = [line["at"] for line in metrics.read_lines(self.run) if line["kind"] == "step"]
        return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


def killed(run: Run, steps: int, kills: int, seconds: tuple[float, float], choose: random.Random) -> Counter[str]:
    """Kill it `kills` times, then let it end. `seconds`: of a start and of a step. Returns behind which points of the
    loop the kills came, `start` before any."""
    behind: Counter[str] = Counter()
    for moment in sorted(choose.uniform(0, steps - 1) for _ in range(kills)):
        before = len(run.points())
        process = run.begin()
        try:
            if choose.random() < EARLY:
                time.sleep(choose.uniform(0, seconds[0]))
            else:  # when the moment has come and this process is in its loop: anywhere in a step
                run.until(process, int(moment))
                while len(run.points()) == before and process.poll() is None:
                    time.sleep(0.002)
                time.sleep(choose.uniform(0, seconds[1]))
            if process.poll() is not None:
                raise StackError(f"the run ended by itself before it was killed: {tail(run.folder / 'log')}")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        passed = run.points()
        behind["start" if len(passed) == before else passed[-1]] += 1
    run.finish()
    return behind


async def reward_of_weights(folder: Path, samples: int) -> float:
    """Mean reward of samples from fixed seeds, by the engine at these weights."""
    async with LocalEngine(folder, name="tiny", threads=1) as engine:

        async def one(index: int) -> float:
            sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=LENGTH, seed=HELD_OUT_SEED + index)
            ids: list[int] = []
            async for event in engine.sample(TextRequest("tiny", PROMPT, sampling)):
                ids += event.token_ids
            return reward_of(ids)

        return float(np.mean(await asyncio.gather(*map(one, range(samples)))))


async def account(run: Run) -> dict[str, int]:
    """Groups: rolled out, trained (in the steps that the last weights are made of), trained twice, not trained, and
    not known to the feed as trained."""
    async with open_store(f"sqlite:///{run.folder}/polar.db") as store:
        depth = await store.feed.depth()
    trained = Counter(
        group for line in metrics.read_lines(run.run) if line["kind"] == "step" for group in line["groups"]
    )
    offered = sum(depth.values())
    return {
        "groups": offered,
        "groups_trained": len(trained),
        "trained_twice": sum(count - 1 for count in trained.values()),
        "skipped": offered - len(trained),
        "unacknowledged": offered - depth.get("delivered", 0),
    }


def last(run: Run) -> checkpoint.Checkpoint:
    folder = checkpoint.latest(run.run)
    assert folder is not None
    return checkpoint.load(folder, restore_rng=False)


def apart(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> float:
    """The largest difference of any weight."""
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


async def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    model = make_random_model(folder / "model", vocab_size=300)
    begun = await reward_of_weights(model, given.samples)
    seeds = []
    for seed in range(given.seeds):
        print(f"seed {seed} ...", file=sys.stderr, flush=True)
        alone = Run(folder / f"alone-{seed}", model, seed, given.steps)
        seconds = alone.finish()  # nothing else is to be done meanwhile
        row: dict[str, Any] = {
            "seed": seed,
            "reward_uninterrupted": await reward_of_weights(last(alone).folder, given.samples),
        }
        if seed < given.killed:
            hurt = Run(folder / f"killed-{seed}", model, seed, given.steps)
            choose = random.Random(f"{given.seed}/{seed}")
            behind = killed(hurt, given.steps, given.kills, seconds, choose)
            whole, found = last(alone), last(hurt)
            lost = sum(line["steps_lost"] for line in metrics.read_lines(hurt.run) if line["kind"] == "start")
            row |= {
                "kills": sum(behind.values()),
                "killed_behind": dict(behind),
                "steps": found.state.step,
                "steps_done_again": lost,
                **await account(hurt),
                "reward_killed": await reward_of_weights(found.folder, given.samples),
                "weights_apart": apart(whole, found),
                "weights_moved": apart(whole, checkpoint.Checkpoint(model, whole.state, start_weights(model), {})),
            }
        seeds.append(row)
    return document(begun, seeds)


def start_weights(model: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def document(begun: float, seeds: list[dict[str, Any]]) -> dict[str, Any]:
    hurt = [row for row in seeds if "kills" in row]
    alone = [row["reward_uninterrupted"] for row in seeds]
    deviation = float(np.std(alone, ddof=1))
    off = [abs(row["reward_killed"] - row["reward_uninterrupted"]) for row in hurt]
    counts = {
        name: sum(row[name] for row in hurt)
        for name in (
            "kills",
            "steps",
            "steps_done_again",
            "groups_trained",
            "trained_twice",
            "skipped",
            "unacknowledged",
        )
    }
    return {
        **counts,
        "reward_begun": begun,
        "reward_killed": float(np.mean([row["reward_killed"] for row in hurt])),
        "reward_uninterrupted": float(np.mean(alone)),
        "deviation_of_seeds": deviation,
        "largest_difference_of_a_seed": max(off),
        "within_noise": max(off) <= 2 * deviation,
        "weights_apart": max(row["weights_apart"] for row in hurt),
        "weights_moved": min(row["weights_moved"] for row in hurt),
        "seeds": seeds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each killed run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5, help="runs that are left alone: the noise")
    parser.add_argument("--killed", type=int, default=3, help="of these seeds, so many are run again and killed")
    parser.add_argument("--samples", type=int, default=512, help="by which the reward of weights is measured")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not 1 <= given.killed <= given.seeds or given.steps < 2 or given.seeds < 2:
        parser.error("--killed is 1 to --seeds, --seeds and --steps at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process and no folder is left
    try:
        with own_folder("resume") as folder:
            found = asyncio.run(measure(folder, given))
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            if name != "seeds":
                print(f"{name}: {value}")
    wrong = found["trained_twice"] + found["skipped"] + found["unacknowledged"]
    return 0 if found["within_noise"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
