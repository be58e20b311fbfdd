"""The curves of learning runs in one picture: `python examples/learn/curves.py runs/learn-local-* --out learning.png`.

Lines: mean reward of the rollouts of the last four steps. Points: held-out instances, with 95 % intervals.
`--keep FILE` writes the plotted values as JSON; such a file can be given instead of folders.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from polar_proxy.training import metrics

SMOOTH = 4
PLOTTED = {"step": ("step", "reward"), "eval": ("step", "reward", "reward_interval")}


def read_series(path: Path) -> dict[str, Any]:
    """Return the plotted series by run, from the folder of a run or from a file of several runs."""
    if path.is_file():
        runs: dict[str, Any] = json.loads(path.read_text())
        return runs
    series = metrics.series(metrics.read_lines(path))
    return {path.name: {kind: {name: series[kind][name] for name in names} for kind, names in PLOTTED.items()}}


def draw(runs: dict[str, Any], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes = figure.subplots()
    for colour, (name, series) in enumerate(runs.items()):
        heldout, rewards = series["eval"], series["step"]["reward"]
        smooth = [float(np.mean(rewards[max(0, at - SMOOTH) : at])) for at in range(1, len(rewards) + 1)]
        axes.plot(series["step"]["step"], smooth, color=f"C{colour}", linewidth=1)
        style = {"color": f"C{colour}", "marker": "o", "linestyle": "none", "capsize": 3, "label": name}
        axes.errorbar(heldout["step"], heldout["reward"], heldout["reward_interval"], **style)
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
    arguments = parser.parse_args()
    runs = {name: series for path in arguments.runs for name, series in read_series(path).items()}
    draw(runs, arguments.out)
    if arguments.keep is not None:
        arguments.keep.write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
