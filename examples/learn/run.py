"""An agent gets better because it ran through Polar: GRPO with the bundled policy on the built-in task family.

    python examples/learn/run.py --engine local --seed 0 --json
    python examples/learn/run.py --engine local --seed 0 --shuffle-rewards --json    # the control: must not improve
    python examples/learn/run.py --engine vllm --engine-url http://127.0.0.1:8000 --seed 0 --json

mini-swe-agent works on instances that it never sees twice; after some steps, other, held-out instances are rolled out
with the weights of that moment. Prints {"initial", "final", "steps", "minutes", "heldout"}: mean reward on the held-out
instances before and after, and in between. Killed, the same command goes on where the last checkpoint stands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from polar_proxy.cli import common
from polar_proxy.cli.attached import train_grpo
from polar_proxy.cli.train import summary
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.training.config import make_config, read_toml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the harness is examples.learn.harness


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--engine-url", help="vllm: where it serves the bundled policy, in development mode")
    parser.add_argument("--model", help="vllm: the served name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: rewards at other rollouts")
    parser.add_argument("--config", type=Path, default=HERE / "learn.toml", help="the run's settings")
    parser.add_argument("--steps", type=int, help="default: as in the settings")
    parser.add_argument("--sandbox", help="auto, docker, bubblewrap or process")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the run and its database")
    parser.add_argument("--json", action="store_true", help="one JSON document, nothing else, on standard output")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    own, tables = read_toml(given.config)
    # Each seed has training instances of its own.
    flags = {"seed": given.seed, "steps": given.steps, "first_seed": own["first_seed"] + 1_000_000 * given.seed}
    flags |= {"shuffle_rewards": given.shuffle_rewards, "weights": str(POLAR_TINY)}
    config = make_config(own, flags)
    name = f"learn-{given.engine}-{given.seed}{'-shuffled' if given.shuffle_rewards else ''}"
    folder = (given.out / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    engine = {"kind": given.engine, "url": given.engine_url, "model": given.model}
    settings = common.load_settings(
        f"sqlite:///{folder}/polar.db",
        engine=engine,
        run={**tables["run"], **({"sandbox": given.sandbox} if given.sandbox else {})},
    )
    state = asyncio.run(train_grpo(settings, config, folder, lambda line: print(line, file=sys.stderr)))
    heldout = summary(folder)["heldout"]
    told = {
        "initial": heldout[0]["reward"],
        "final": heldout[-1]["reward"],
        "steps": state.step,
        "minutes": round(state.minutes, 2),
        "heldout": heldout,
    }
    if given.json:
        print(json.dumps(told))
    else:
        for held in heldout:
            print(f"after {held['step']:3d} steps: held-out reward {held['reward']:.3f}")
        print(f"{told['initial']:.3f} -> {told['final']:.3f} in {told['steps']} steps, {told['minutes']} minutes")


if __name__ == "__main__":
    main()
