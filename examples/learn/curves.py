"""The curves of learning runs in one picture: `python examples/learn/curves.py runs/learn-local-* --out learning.png`.

Lines: mean reward of each step's rollouts, over the last four steps. Points: held-out instances, with 95 % intervals.
`--keep FILE` writes what is drawn as JSON, and such a file may be given in the place of folders.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from polar_proxy.training import curves, metrics

SMOOTH = 4
DRAWN = {"step": ("step", "reward"), "eval": ("step", "reward", "reward_interval")}


def read(given: Path) -> dict[str, Any]:
    """Of a run's folder, or a file of several: by name, the series that are drawn."""
    if given.is_file():
        kept: dict[str, Any] = json.loads(given.read_text())
        return kept
    told = curves.series(metrics.read_lines(given))
    return {given.name: {kind: {name: told[kind][name] for name in names} for kind, names in DRAWN.items()}}


def draw(runs: dict[str, Any], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes = figure.subplots()
    for colour, (name, told) in enumerate(runs.items()):
        held, rewards = told["eval"], told["step"]["reward"]
        smooth = [float(np.mean(rewards[max(0, at - SMOOTH) : at])) for at in range(1, len(rewards) + 1)]
        axes.plot(told["step"]["step"], smooth, color=f"C{colour}", linewidth=1)
        look = {"color": f"C{colour}", "marker": "o", "linestyle": "none", "capsize": 3, "label": name}
        axes.errorbar(held["step"], held["reward"], held["reward_interval"], **look)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=90, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or files that --keep wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    runs = {name: told for path in given.runs for name, told in read(path).items()}
    draw(runs, given.out)
    if given.keep is not None:
        given.keep.write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
