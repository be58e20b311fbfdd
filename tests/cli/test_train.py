"""`polar train`: which instances are trained on, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar_proxy.cli.train import app
from polar_proxy.errors import UsageError
from polar_proxy.tasks import get_source
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.metrics import run_summary
from polar_proxy.training.run import TaskSampler

SWE = get_source("swe-task")


def test_a_family_gives_new_instances_every_round_and_others_to_measure() -> None:
    chosen = TaskSampler(SWE, GrpoConfig(groups=3, first_seed=1_000_000, eval_instances=2, eval_first_seed=5))
    assert [chosen.batch(number) for number in range(2)] == [
        [1_000_000, 1_000_001, 1_000_002],
        [1_000_003, 1_000_004, 1_000_005],
    ]
    assert list(chosen.held_out) == [5, 6]


def test_a_fixed_set_is_gone_through_in_an_order_of_the_runs_seed() -> None:
    config = GrpoConfig(groups=2, instances=4, first_seed=100)
    first, second = (TaskSampler(SWE, config) for _ in range(2))
    rounds = [first.batch(number) for number in range(4)]
    assert rounds == [second.batch(number) for number in range(4)]
    epochs = [rounds[0] + rounds[1], rounds[2] + rounds[3]]
    assert [sorted(epoch) for epoch in epochs] == [[100, 101, 102, 103]] * 2
    assert epochs[0] != epochs[1]
    other = TaskSampler(SWE, config.model_copy(update={"seed": 1}))
    assert [other.batch(number) for number in range(4)] != rounds


@pytest.mark.parametrize(("first", "instances"), [(0, None), (10, 20), (30, None)])
def test_held_out_instances_are_never_trained_on(first: int, instances: int | None) -> None:
    config = GrpoConfig(first_seed=first, instances=instances, eval_first_seed=25, eval_instances=10)
    with pytest.raises(UsageError, match="overlap"):
        TaskSampler(SWE, config)
    TaskSampler(SWE, config.model_copy(update={"first_seed": 35}))


def invoked(*arguments: str) -> Any:
    """In this process: PyTorch takes longer to load than all that is tested here."""
    return CliRunner().invoke(app, [*arguments])


def test_what_cannot_be_is_told(polar_home: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[grpo]\nsteps = 3\n[harness]\nname = 1\n")
    for arguments, message in (
        (["--config", str(tmp_path / "bad.toml")], "unknown tables: harness"),
        (["--config", str(tmp_path / "none.toml")], "cannot be read"),
        (["--loss", "nothing"], "choose ppo_clip"),
        (["--set", "builder=longest"], "setting builder"),
        (["--set", "weight_transfer=nccl"], "NCCL sends from a GPU"),
        (["--submit-jobs"], "`submit_jobs` needs `feed`"),
        (["--feed", "http://127.0.0.1:9", "--run", str(tmp_path / "fed")], "to the vLLM that the server samples"),
    ):
        error = invoked("grpo", *arguments).exception
        assert isinstance(error, UsageError)
        assert message in str(error)
    with pytest.raises(UsageError, match="no run"):
        run_summary(tmp_path / "nothing")
