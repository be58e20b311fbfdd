"""`polar train grpo` with real rollouts: one step, taken up by a second command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.training.metrics import run_summary
from tests.cli.test_train import invoked


@pytest.mark.full
def test_a_run_of_real_rollouts_and_its_continuation(polar_home: Path, tmp_path: Path) -> None:
    """The bundled policy, a real agent program in a real sandbox, hidden tests: one step, then one more."""
    file = tmp_path / "train.toml"
    file.write_text(
        "[grpo]\ngroups = 1\nsamples = 2\neval_every = 1\neval_instances = 1\nkeep_flat_groups = true\n"
        '[run]\nharness = "tests.fakes.tiny_agent:TinyAgent"\nsandbox = "process"\nmax_tokens = 256\n'
    )
    run = tmp_path / "first"

    def train(steps: int) -> Any:
        done = invoked("grpo", "--config", str(file), "--run", str(run), "--steps", str(steps))
        assert done.exception is None, done.output
        return run_summary(run)

    once = train(1)
    assert (once["steps"], once["updates"], once["rollouts"], len(once["heldout"])) == (1, 1, 2, 2)
    assert once["trained_tokens"] > 0
    # Engine and trainer are two programs over the same weights; they agree on every token that was sampled.
    assert once["mismatch_max"] < 1e-2
    twice = train(2)
    assert (twice["steps"], twice["rollouts"], twice["rewards"][:1]) == (2, 4, once["rewards"])
    assert [held["step"] for held in twice["heldout"]] == [0, 1, 2]
    told = invoked("status", str(run), "--json")
    assert orjson.loads(told.stdout) == twice
    assert "held-out reward after 2 steps" in invoked("status", str(run)).stdout
