"""The curves of learning runs in one picture: `python examples/learn/curves.py runs/learn-local-* --out learning.png`.

Lines: mean reward of each step's rollouts, over the last four steps. Points: held-out instances, with 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from polar_proxy.training import curves, metrics

SMOOTH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes = figure.subplots()
    for colour, run in enumerate(given.runs):
        told = curves.series(metrics.read(run))
        held, rewards = told["eval"], told["step"]["reward"]
        smooth = [float(np.mean(rewards[max(0, at - SMOOTH) : at])) for at in range(1, len(rewards) + 1)]
        axes.plot(told["step"]["step"], smooth, color=f"C{colour}", linewidth=1)
        look = {"color": f"C{colour}", "marker": "o", "linestyle": "none", "capsize": 3, "label": run.name}
        axes.errorbar(held["step"], held["reward"], held["reward_interval"], **look)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(given.out, dpi=90, bbox_inches="tight")


if __name__ == "__main__":
    main()
