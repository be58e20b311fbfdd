"""The curves of learning runs in one picture: `python examples/learn/curves.py runs/learn-local-* --out learning.png`.

Lines: mean reward of each step's rollouts, over the last four steps. Points: held-out instances, with 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from polar_proxy.training import metrics

SMOOTH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for colour, run in enumerate(given.runs):
        lines = list(metrics.read(run))
        rewards = [line["reward"] for line in lines if line["kind"] == "step"]
        smooth = [float(np.mean(rewards[max(0, at - SMOOTH) : at])) for at in range(1, len(rewards) + 1)]
        held = [line for line in lines if line["kind"] == "eval"]
        axes.plot(range(1, len(rewards) + 1), smooth, color=f"C{colour}", linewidth=1)
        axes.errorbar(
            [line["step"] for line in held],
            [line["reward"] for line in held],
            [line["reward_interval"] for line in held],
            color=f"C{colour}",
            marker="o",
            linestyle="none",
            capsize=3,
            label=run.name,
        )
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(given.out, dpi=90, bbox_inches="tight")


if __name__ == "__main__":
    main()
