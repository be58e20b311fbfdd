"""LoRA: it starts exactly at the base model, moves only the adapter, and resumes exactly from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from polar_proxy.engines.local import LocalEngine
from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.training import metrics
from polar_proxy.training.config import LoraSettings, make_config
from polar_proxy.training.policy import checkpoint, lora
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.weight_sync import LocalSync, probe, probe_ids
from tests.engines.conftest import make_random_model
from tests.training.bandit import CONFIG, opened, trainer
from tests.training.test_model import ANSWERS, PROMPT, batch, learner

pytestmark = pytest.mark.slow

IDS = [*PROMPT, *ANSWERS[0]]
LORA: dict[str, Any] = {"lora": LoraSettings(rank=4), "learning_rate": 1e-2, "loss_aggregation": "token"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("policy"), vocab_size=300)


def tensors(policy: Learner) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in policy.model.named_parameters()}


def test_new_adapter_changes_nothing(folder: Path) -> None:
    plain, adapted = learner(folder), learner(folder, **LORA)
    assert adapted.logprobs(IDS) == plain.logprobs(IDS)
    assert adapted.weights().keys() == plain.weights().keys()
    assert all(torch.equal(one, plain.weights()[name]) for name, one in adapted.weights().items())


def test_step_changes_only_the_adapter(folder: Path) -> None:
    policy = learner(folder, **LORA)
    before = tensors(policy)
    policy.update(batch(folder), 0)
    moved = {name for name, one in tensors(policy).items() if not torch.equal(one, before[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    # B moves in every layer; A moves from the second step on, because B was 0.
    assert {name for name in before if ".lora_B." in name} == moved
    policy.update(batch(folder), 1)
    assert {name for name, one in tensors(policy).items() if not torch.equal(one, before[name])} == {
        name for name in before if ".lora_" in name
    }


def test_step_makes_rewarded_answers_likelier(folder: Path) -> None:
    policy = learner(folder, **LORA)
    before = [sum(policy.logprobs([*PROMPT, *answer])[3:]) for answer in ANSWERS]
    policy.update(batch(folder), 0)
    policy.update(batch(folder), 1)
    after = [sum(policy.logprobs([*PROMPT, *answer])[3:]) for answer in ANSWERS]
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, False, True, False]


async def test_merged_weights_equal_the_policy_in_trainer_and_engine(folder: Path) -> None:
    policy = learner(folder, **LORA)
    first = policy.logprobs(probe_ids(300))
    policy.update(batch(folder), 0)
    plain = learner(folder)
    plain.restore(policy.weights(), plain.state())
    assert plain.logprobs(IDS) == pytest.approx(policy.logprobs(IDS), abs=1e-5)
    ids = probe_ids(policy.vocab_size)
    async with LocalEngine(folder, name="tiny") as engine:
        await LocalSync(engine).push(policy.weights(), "1")
        result = await probe(engine, ids, policy.logprobs(ids), first, 1e-3)
    assert result.moved is not None
    assert result.moved > 10 * result.mean


def test_checkpoint_resumes_exactly_and_is_a_plain_model(folder: Path, tmp_path: Path) -> None:
    def saved(policy: Learner, step: int) -> checkpoint.Checkpoint:
        state = TrainerState(step, step, str(step), ())
        path = checkpoint.save(tmp_path, state, policy.weights(), policy.state(), model=folder, keep=1)
        return checkpoint.load(path)

    straight = learner(folder, **LORA)
    straight.update(batch(folder), 0)
    kept = saved(straight, 1)
    straight.update(batch(folder), 1)
    resumed = learner(folder, **LORA)
    resumed.restore(kept.weights, kept.optimiser)
    resumed.update(batch(folder), 1)
    assert all(torch.equal(one, tensors(straight)[name]) for name, one in tensors(resumed).items())
    served = Learner(load_model(saved(straight, 2).folder), make_config({}))
    assert served.logprobs(IDS) == pytest.approx(straight.logprobs(IDS), abs=1e-5)


def test_rejects_adapter_of_another_base_or_rank(folder: Path) -> None:
    policy = learner(folder, **LORA)
    policy.update(batch(folder), 0)
    other = load_model(folder)
    with torch.no_grad():
        next(other.parameters()).add_(0.01)
    with pytest.raises(TrainingError, match="other base weights"):
        Learner(other, make_config({"lora": {"rank": 4}})).restore(policy.weights(), policy.state())
    with pytest.raises(TrainingError, match="another adapter"):
        learner(folder, lora=LoraSettings(rank=2)).restore(policy.weights(), policy.state())


def test_peft_loads_the_saved_adapter(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    policy = learner(folder, **LORA)
    policy.update(batch(folder), 0)
    lora.save_adapter(lora.adapter(policy.model), LORA["lora"], tmp_path)
    assert orjson.loads((tmp_path / "adapter_config.json").read_bytes())["r"] == 4
    assert load_file(tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(load_model(folder), tmp_path).merge_and_unload().requires_grad_(True)
    assert Learner(loaded, make_config({})).logprobs(IDS) == pytest.approx(policy.logprobs(IDS), abs=1e-5)


async def test_loop_trains_and_resumes_an_adapter(folder: Path, tmp_path: Path) -> None:
    """Two steps, then two more by a new trainer, with the probe after each sync."""
    config = CONFIG.model_copy(update={"lora": LoraSettings(rank=4), "learning_rate": 5e-3, "steps": 2})
    async with opened(tmp_path, folder) as (store, engine):
        await trainer(tmp_path, folder, store, engine, config).train()
    more = config.model_copy(update={"steps": 4})
    async with opened(tmp_path, folder) as (store, engine):
        state = await trainer(tmp_path, folder, store, engine, more).train()
        assert (state.step, await engine.weight_version()) == (4, "4")
    lines = list(metrics.read_lines(tmp_path / "run"))
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["mismatch_max"] for line in steps if line["updated"]) < 1e-3  # the engine samples with the adapter
    assert max(line["largest"] for line in lines if line["kind"] == "sync") < 1e-3


def test_lora_settings(folder: Path) -> None:
    config = make_config({"lora": {"rank": 8, "targets": ["q_proj"]}})
    assert config.to_json()["lora"] == {"rank": 8, "scale": 2.0, "targets": ["q_proj"], "adapter_name": None}
    policy = Learner(load_model(folder), config)
    assert {name.split(".")[-4] for name in lora.adapter(policy.model)} == {"q_proj"}
    with pytest.raises(UsageError, match="names no module"):
        Learner(load_model(folder), make_config({"lora": {"targets": ["nothing_of_that_name"]}}))
    with pytest.raises(UsageError, match="rank"):
        make_config({"lora": {"rank": 0}})
