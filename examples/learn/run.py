"""An agent improves because it ran through Polar: GRPO with the bundled policy on the built-in task family.

    python examples/learn/run.py --engine local --seed 0 --json
    python examples/learn/run.py --engine local --seed 0 --shuffle-rewards --json    # the control: must not improve
    python examples/learn/run.py --engine vllm --engine-url http://127.0.0.1:8000 --seed 0 --json

mini-swe-agent works on training instances that it sees only once; every few steps, held-out instances are rolled out
with the weights of that moment. Prints {"initial", "final", "steps", "minutes", "heldout"}: the mean reward on the
held-out instances before, after and in between. Run the command again to resume a run that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from polar_proxy.cli.common import load_settings, open_database
from polar_proxy.config import Settings
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.training.config import GrpoConfig, make_config, read_toml
from polar_proxy.training.metrics import run_summary
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.run import train_locally

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the harness is examples.learn.harness


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--engine-url", help="vllm: address of a server of the bundled policy, in development mode")
    parser.add_argument("--model", help="vllm: the served name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: shuffle rewards among rollouts")
    parser.add_argument("--config", type=Path, default=HERE / "learn.toml", help="the run's settings")
    parser.add_argument("--steps", type=int, help="default: as in the settings")
    parser.add_argument("--sandbox", help="auto, docker, bubblewrap or process")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the run and its database")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser.parse_args()


async def train(settings: Settings, config: GrpoConfig, folder: Path) -> TrainerState:
    async with open_database(settings, create=True) as store:
        return await train_locally(settings, config, folder, store, lambda line: print(line, file=sys.stderr))


def main() -> None:
    arguments = parse_arguments()
    grpo, tables = read_toml(arguments.config)
    # Each seed has its own training instances.
    flags = {
        "seed": arguments.seed,
        "steps": arguments.steps,
        "first_seed": grpo["first_seed"] + 1_000_000 * arguments.seed,
        "shuffle_rewards": arguments.shuffle_rewards,
        "weights": str(POLAR_TINY),
    }
    config = make_config(grpo, flags)
    control = "-shuffled" if arguments.shuffle_rewards else ""
    folder = (arguments.out / f"learn-{arguments.engine}-{arguments.seed}{control}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settings = load_settings(
        f"sqlite:///{folder}/polar.db",
        engine={"kind": arguments.engine, "url": arguments.engine_url, "model": arguments.model},
        run={**tables["run"], **({"sandbox": arguments.sandbox} if arguments.sandbox else {})},
    )
    state = asyncio.run(train(settings, config, folder))
    heldout = run_summary(folder)["heldout"]
    initial, final = heldout[0]["reward"], heldout[-1]["reward"]
    minutes = round(state.minutes, 2)
    if arguments.json:
        result = {"initial": initial, "final": final, "steps": state.step, "minutes": minutes, "heldout": heldout}
        print(json.dumps(result))
    else:
        for line in heldout:
            print(f"after {line['step']:3d} steps: held-out reward {line['reward']:.3f}")
        print(f"{initial:.3f} -> {final:.3f} in {state.step} steps, {minutes} minutes")


if __name__ == "__main__":
    main()
