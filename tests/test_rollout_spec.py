"""One edit of `RolloutSpec` adds an option everywhere: command line, settings, API and database."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import polar_proxy
from polar_proxy.api_models import JobRequest
from polar_proxy.cli import rollouts, train
from polar_proxy.config import Settings
from polar_proxy.documented import field_descriptions
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec, RolloutSpec
from polar_proxy.rollouts import submit
from polar_proxy.store import Store
from polar_proxy.tasks import get_source

pytestmark = pytest.mark.slow


def test_every_field_has_a_help_text() -> None:
    assert field_descriptions(JobSpec).keys() == JobSpec.model_fields.keys()


def test_every_field_is_a_command_line_option() -> None:
    assert RolloutSpec.model_fields.keys() <= inspect.signature(rollouts.run).parameters.keys()
    assert JobSpec.model_fields.keys() <= inspect.signature(rollouts.submit).parameters.keys()
    set_by_grpo = {"temperature", "train_timed_out"}
    assert RolloutSpec.model_fields.keys() - set_by_grpo <= inspect.signature(train.grpo).parameters.keys()


def test_every_field_is_a_settings_key() -> None:
    assert RolloutSpec.model_fields.keys() <= type(Settings().run).model_fields.keys()


def test_every_field_is_in_the_api_schema() -> None:
    properties = JobRequest.model_json_schema()["properties"]
    assert JobSpec.model_fields.keys() <= properties.keys()
    assert all(properties[name]["description"] for name in JobSpec.model_fields)


async def test_every_field_is_stored_and_read_by_the_worker(store: Store) -> None:
    spec = JobSpec(harness="shell:true", sandbox="process", temperature=0.5, timeout=7, train_timed_out=True)
    await submit(store, [get_source("swe-task").task(1)], spec)
    (claim,) = await store.queue.claim("worker", 1, 60.0)
    assert RolloutSpec.read(claim.config) == spec.rollout()
    assert claim.config.keys() == RolloutSpec.model_fields.keys()


def test_settings_fill_in_what_a_job_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_RUN__TIMEOUT", "9")
    monkeypatch.setenv("POLAR_RUN__SAMPLES", "3")
    body = JobRequest.model_validate({"task": "swe-task", "temperature": 0.25, "harness": None})
    given = body.model_dump(include=body.model_fields_set & JobSpec.model_fields.keys())
    spec = Settings().run.job_spec(**given)
    assert (spec.timeout, spec.samples, spec.temperature, spec.harness) == (9, 3, 0.25, "mini-swe-agent")


def test_unreadable_stored_options_name_the_field() -> None:
    with pytest.raises(UsageError, match="temperature"):
        RolloutSpec.read({"temperature": -1})


CHECK_TRIAL_OPTION = """
from typer.testing import CliRunner

from polar_proxy.api_models import JobRequest
from polar_proxy.cli.app import app
from polar_proxy.config import Settings
from polar_proxy.rollout_spec import JobSpec, RolloutSpec

for command in ("run", "submit"):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "--trial" in shown and "A trial option." in shown, shown
assert Settings().run.trial == 3
assert JobRequest.model_json_schema()["properties"]["trial"]["default"] == 3
stored = JobSpec(trial=5).rollout().model_dump(mode="json")
assert RolloutSpec.read(stored).trial == 5
"""


def test_a_new_option_is_one_edit(tmp_path: Path) -> None:
    """Adds a field to a copy of rollout_spec.py; the rest of the package is linked unchanged."""
    package = Path(polar_proxy.__file__).parent
    (tmp_path / "polar_proxy").mkdir()
    for path in package.iterdir():
        (tmp_path / "polar_proxy" / path.name).symlink_to(path)
    source = (package / "rollout_spec.py").read_text()
    line = "    train_timed_out: bool = False\n"
    assert source.count(line) == 1
    (tmp_path / "polar_proxy" / "rollout_spec.py").unlink()
    option = '    trial: int = Field(3, ge=1)\n    """A trial option."""\n'
    (tmp_path / "polar_proxy" / "rollout_spec.py").write_text(source.replace(line, option + line))
    done = subprocess.run([sys.executable, "-c", CHECK_TRIAL_OPTION], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_refuse_unknown_fields() -> None:
    model: type[BaseModel]
    for model in (RolloutSpec, JobSpec, JobRequest):
        assert model.model_config.get("extra") == "forbid"
