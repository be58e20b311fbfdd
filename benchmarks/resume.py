"""A training run that is killed with SIGKILL and resumed many times: is a group trained twice, or skipped?

    python benchmarks/resume.py --kills 10 --json

One run per seed is undisturbed; for some seeds another run is killed `--kills` times, at random moments over its whole
length. The feed and the metrics say which groups were trained. Rollouts are sampled from fixed seeds, so the weights of
the killed run must equal those of the undisturbed one. The process is `_stacks/bandit_run.py`. Exit code 1 if a group
was trained twice or skipped, or if rewards differ by more than twice the standard deviation between the seeds.
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
from polar_proxy.training import metrics
from polar_proxy.training.policy import checkpoint
from polar_proxy.types import Sampling, TextRequest
from tests.engines.conftest import make_random_model
from tests.training.bandit import LENGTH, PROMPT, reward_of

HELD_OUT_SEED = 10**9
EARLY_SHARE = 0.2
"""Share of the kills that come while the process starts and resumes."""
HANG_SECONDS = 300.0
"""A run without a step for this long counts as hanging."""


class KillableRun:
    """A training run in its own folder, which one process after the other continues."""

    def __init__(self, folder: Path, model: Path, seed: int, steps: int) -> None:
        self.folder, self.run = folder, folder / "run"
        self._arguments = [str(folder), str(model), str(seed), str(steps)]
        folder.mkdir()

    def start(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "benchmarks._stacks.bandit_run", *self._arguments]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)

    def points(self) -> list[str]:
        """Return the names of the training loop's points in the order in which they were passed so far."""
        path = self.folder / "points"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def until(self, process: subprocess.Popen[bytes], enough: int) -> bool:
        """Wait until this many steps of the run were synced; return False if the run ended first. Raises StackError if
        it failed or made no progress."""
        changed_at, seen = time.monotonic(), 0
        while (points := self.points()).count("synced") < enough:
            now = len(points)
            if process.poll() is not None:
                if process.returncode:
                    raise StackError(f"the run ended with {process.returncode}: {tail(self.folder / 'log')}")
                return False
            if now != seen:
                changed_at, seen = time.monotonic(), now
            if time.monotonic() - changed_at > HANG_SECONDS:
                raise StackError(f"no step for {HANG_SECONDS:g} s: {tail(self.folder / 'log')}")
            time.sleep(0.002)
        return True

    def finish(self) -> tuple[float, float]:
        """Run to the end. Return the seconds from the start to the end of the first step, and the mean of a step."""
        started, process = time.time(), self.start()
        try:
            self.until(process, 10**9)
        finally:
            process.kill()
            process.wait()
        times = [line["at"] for line in metrics.read_lines(self.run) if line["kind"] == "step"]
        return times[0] - started, (times[-1] - times[0]) / max(1, len(times) - 1)


def killed(
    run: KillableRun, steps: int, kills: int, seconds: tuple[float, float], random_source: random.Random
) -> Counter[str]:
    """Kill the run `kills` times, then let it end. `seconds`: duration of a start and of a step.

    Returns how many kills came after each point of the loop; `start` counts those before the first point.
    """
    kill_points: Counter[str] = Counter()
    for moment in sorted(random_source.uniform(0, steps - 1) for _ in range(kills)):
        before = len(run.points())
        process = run.start()
        try:
            if random_source.random() < EARLY_SHARE:
                time.sleep(random_source.uniform(0, seconds[0]))
            else:  # at a random moment in the drawn step, once this process is in its training loop
                run.until(process, int(moment))
                while len(run.points()) == before and process.poll() is None:
                    time.sleep(0.002)
                time.sleep(random_source.uniform(0, seconds[1]))
            if process.poll() is not None:
                raise StackError(f"the run ended by itself before it was killed: {tail(run.folder / 'log')}")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        passed = run.points()
        kill_points["start" if len(passed) == before else passed[-1]] += 1
    run.finish()
    return kill_points


async def reward_of_weights(folder: Path, samples: int) -> float:
    """Return the mean reward of answers that an engine with these weights samples from fixed seeds."""
    async with LocalEngine(folder, name="tiny") as engine:

        async def one(index: int) -> float:
            sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=LENGTH, seed=HELD_OUT_SEED + index)
            ids: list[int] = []
            async for event in engine.sample(TextRequest("tiny", PROMPT, sampling)):
                ids += event.token_ids
            return reward_of(ids)

        return float(np.mean(await asyncio.gather(*map(one, range(samples)))))


async def count_groups(run: KillableRun) -> dict[str, int]:
    """Count groups: rolled out, trained (in the steps of the last weights), trained twice, skipped, unacknowledged."""
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


def last(run: KillableRun) -> checkpoint.Checkpoint:
    folder = checkpoint.latest(run.run)
    assert folder is not None
    return checkpoint.load(folder)


def largest_difference(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> float:
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    model = make_random_model(folder / "model", vocab_size=300)
    initial = await reward_of_weights(model, arguments.samples)
    seeds = []
    for seed in range(arguments.seeds):
        print(f"seed {seed} ...", file=sys.stderr, flush=True)
        undisturbed = KillableRun(folder / f"undisturbed-{seed}", model, seed, arguments.steps)
        seconds = undisturbed.finish()  # blocks on purpose: nothing else may run meanwhile
        row: dict[str, Any] = {
            "seed": seed,
            "reward_uninterrupted": await reward_of_weights(last(undisturbed).folder, arguments.samples),
        }
        if seed < arguments.killed:
            disturbed = KillableRun(folder / f"killed-{seed}", model, seed, arguments.steps)
            random_source = random.Random(f"{arguments.seed}/{seed}")
            kill_points = killed(disturbed, arguments.steps, arguments.kills, seconds, random_source)
            expected, found = last(undisturbed), last(disturbed)
            lost = sum(line["steps_lost"] for line in metrics.read_lines(disturbed.run) if line["kind"] == "start")
            row |= {
                "kills": sum(kill_points.values()),
                "killed_after": dict(kill_points),
                "steps": found.state.step,
                "steps_done_again": lost,
                **await count_groups(disturbed),
                "reward_killed": await reward_of_weights(found.folder, arguments.samples),
                "weights_difference": largest_difference(expected, found),
                "weights_moved": largest_difference(
                    expected, checkpoint.Checkpoint(model, expected.state, start_weights(model), {})
                ),
            }
        seeds.append(row)
    return summarise(initial, seeds)


def start_weights(model: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def summarise(initial: float, seeds: list[dict[str, Any]]) -> dict[str, Any]:
    disturbed = [row for row in seeds if "kills" in row]
    undisturbed = [row["reward_uninterrupted"] for row in seeds]
    deviation = float(np.std(undisturbed, ddof=1))
    differences = [abs(row["reward_killed"] - row["reward_uninterrupted"]) for row in disturbed]
    counts = {
        name: sum(row[name] for row in disturbed)
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
        "reward_initial": initial,
        "reward_killed": float(np.mean([row["reward_killed"] for row in disturbed])),
        "reward_uninterrupted": float(np.mean(undisturbed)),
        "deviation_of_seeds": deviation,
        "largest_difference_of_a_seed": max(differences),
        "within_noise": max(differences) <= 2 * deviation,
        "weights_difference": max(row["weights_difference"] for row in disturbed),
        "weights_moved": min(row["weights_moved"] for row in disturbed),
        "seeds": seeds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills of each disturbed run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5, help="undisturbed runs, which give the noise")
    parser.add_argument("--killed", type=int, default=3, help="number of seeds with a disturbed run")
    parser.add_argument("--samples", type=int, default=512, help="samples that measure the reward of weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not 1 <= arguments.killed <= arguments.seeds or arguments.steps < 2 or arguments.seeds < 2:
        parser.error("--killed is 1 to --seeds, --seeds and --steps at least 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the with blocks, which remove processes and folder
    try:
        with own_folder("resume") as folder:
            report = asyncio.run(measure(folder, arguments))
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        for name, value in report.items():
            if name != "seeds":
                print(f"{name}: {value}")
    wrong = report["trained_twice"] + report["skipped"] + report["unacknowledged"]
    return 0 if report["within_noise"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
