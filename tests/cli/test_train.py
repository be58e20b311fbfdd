"""`polar train grpo` and `polar train status`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_proxy.cli import output
from polar_proxy.errors import UsageError
from polar_proxy.training.metrics import run_summary
from tests.cli.runner import polar, polar_error, polar_json, polar_ok


def test_reports_invalid_options(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[grpo]\nsteps = 3\n[harness]\nname = 1\n")
    for options, message in (
        (["--config", str(tmp_path / "bad.toml")], "unknown tables: harness"),
        (["--config", str(tmp_path / "none.toml")], "cannot be read"),
        (["--loss", "nothing"], "choose ppo_clip"),
        (["--set", "builder=longest"], "setting builder"),
        (["--set", "weight_transfer=nccl"], "NCCL sends from a GPU"),
        (["--submit-jobs"], "`submit_jobs` needs `feed`"),
        (["--feed", "http://127.0.0.1:9", "--run", str(tmp_path / "fed")], "to the vLLM server that samples"),
    ):
        assert message in polar_error("train", "grpo", *options), options


def test_help_shows_the_sections_of_the_file() -> None:
    """Rich would take a name in brackets for markup, and leave it out."""
    words = " ".join(polar_ok("train", "grpo", "--help").replace("│", " ").split())
    assert "TOML file with [grpo], and with [engine], [run], [gateway] as in polar.toml." in words
    assert "any setting of [grpo]" in words


@pytest.mark.slow
def test_training_shows_a_live_table_from_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fail_after_the_first_rollout(*arguments: Any) -> None:
        *_, report, progress = arguments
        report("engine: of the test")
        progress.stage("roll_1", "queued", "swe-task-7")
        raise UsageError("The end.")

    monkeypatch.setattr("polar_proxy.training.run.train_locally", fail_after_the_first_rollout)
    monkeypatch.setattr(output.err, "_force_terminal", True)
    monkeypatch.setattr(output.err, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    shown = polar("train", "grpo", "--run", str(tmp_path / "run")).stderr
    first, last = shown.index("loading the trainer"), shown.rindex("engine: of the test")
    assert first < shown.index("engine: of the test") < last < shown.index("swe-task-7")


def test_there_is_no_summary_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        run_summary(tmp_path / "nothing")
    assert "no run" in polar_error("train", "status", str(tmp_path / "nothing"))


@pytest.mark.full
def test_trains_on_real_rollouts_and_resumes(tmp_path: Path) -> None:
    """The bundled policy, a real agent program in a real sandbox, hidden tests: one step, then one more."""
    file = tmp_path / "train.toml"
    file.write_text(
        "[grpo]\ngroups = 1\nsamples = 2\neval_every = 1\neval_instances = 1\nkeep_zero_variance_groups = true\n"
        '[run]\nharness = "tests.fakes.tiny_agent:FourCallsAgent"\nsandbox = "process"\nmax_tokens = 64\n'
    )
    run = tmp_path / "first"

    def train(steps: int) -> Any:
        return polar_json("train", "grpo", "--config", str(file), "--run", str(run), "--steps", str(steps))

    once = train(1)
    assert (once["steps"], once["updates"], once["rollouts"], len(once["heldout"])) == (1, 1, 2, 2)
    assert once["trained_tokens"] > 0
    # Engine and trainer are two programs with the same weights; they agree on every sampled token.
    assert once["mismatch_max"] < 1e-2
    twice = train(2)
    assert (twice["steps"], twice["rollouts"], twice["rewards"][:1]) == (2, 4, once["rewards"])
    assert [line["step"] for line in twice["heldout"]] == [0, 1, 2]
    assert polar_json("train", "status", str(run)) == twice
    assert "held-out reward after 2 steps" in polar_ok("train", "status", str(run))
