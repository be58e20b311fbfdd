"""New weights into a real vLLM on a CPU: all tensors are loaded under their version, and errors stop the run.

Uses the server at POLAR_TEST_VLLM_URL (polar-tiny, development mode), or starts one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from polar_proxy.cli.common import load_settings
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.errors import TrainingError
from polar_proxy.store import open_store
from polar_proxy.training import metrics
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.run import train_locally
from polar_proxy.training.weight_sync import ProbeResult, VllmControl, VllmDiskSync, probe, probe_ids
from polar_proxy.types import Sampling, TextRequest
from tests.engines.test_vllm_real import serve
from tests.training.test_nccl import send

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

EXACT = 2e-4
"""Largest difference in nats between two float32 programs with equal weights, on unlikely text."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    given = os.environ.get("POLAR_TEST_VLLM_URL")
    if given:
        yield given.rstrip("/")
    else:
        yield from serve(POLAR_TINY)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(url: str) -> AsyncIterator[VllmEngine]:
    async with VllmEngine(url, model="polar-tiny") as opened:
        yield opened


@dataclass
class Policy:
    """The bundled policy of a trainer, whose weights move by as much as a step moves them."""

    engine: VllmEngine
    sync: VllmDiskSync
    learner: Learner = field(default_factory=lambda: Learner(load_model(POLAR_TINY), GrpoConfig()))
    noise: float | None = None

    def __post_init__(self) -> None:
        self.ids = probe_ids(self.learner.vocab_size)
        self.before: list[float] | None = None

    def move(self, seed: int) -> dict[str, Tensor]:
        """Change the weights and return the old ones."""
        old = {name: tensor.clone() for name, tensor in self.learner.weights().items()}
        noise = torch.Generator().manual_seed(seed)
        for tensor in self.learner.weights().values():
            tensor.add_(1e-4 * torch.randn(tensor.shape, generator=noise))
        return old

    async def check(self) -> ProbeResult:
        logprobs = self.learner.logprobs(self.ids)
        result = await probe(self.engine, self.ids, logprobs, self.before, 0.02, self.noise)
        self.before, self.noise = logprobs, self.noise or result.mean
        return result


@pytest.fixture
def policy(engine: VllmEngine, url: str, tmp_path: Path) -> Policy:
    return Policy(engine, VllmDiskSync(VllmControl(url, engine=engine), tmp_path))


async def reported_versions(engine: VllmEngine) -> list[str | None]:
    """Sample, then return the weight version that the engine reports."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=2)
    events = [event async for event in engine.sample(TextRequest("polar-tiny", "one two", sampling))]
    assert sum(len(event.token_ids) for event in events)
    return [await engine.weight_version()]


async def test_every_tensor_is_loaded_and_the_version_reported(policy: Policy) -> None:
    await policy.sync.push(policy.learner.weights(), "0")
    assert (await policy.check()).mean < EXACT
    for version in ("1", "2"):
        policy.move(int(version))
        await policy.sync.push(policy.learner.weights(), version)
        result = await policy.check()
        assert result.moved is not None
        # An old head, or one old layer, would differ by a fifth of the move.
        assert result.mean < min(EXACT, result.moved / 20)
        assert await reported_versions(policy.engine) == [version]


async def test_probe_detects_weights_that_were_not_loaded(policy: Policy) -> None:
    await policy.sync.push(policy.learner.weights(), "0")
    await policy.check()
    old = policy.move(1)
    await policy.sync.push(old, "1")
    with pytest.raises(TrainingError, match="did not load them"):
        await policy.check()


async def test_probe_detects_partly_loaded_weights(policy: Policy) -> None:
    """vLLM's CPU kernels keep an old head that is tied to the embedding."""
    await policy.sync.push(policy.learner.weights(), "0")
    await policy.check()
    old = policy.move(1)
    await policy.sync.push({**policy.learner.weights(), "lm_head.weight": old["model.embed_tokens.weight"]}, "1")
    with pytest.raises(TrainingError, match="only a part of them"):
        await policy.check()


async def test_server_without_nccl_names_the_missing_flags(url: str) -> None:
    [result] = await asyncio.to_thread(send, url)
    assert "Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config" in result["error"]


class WrongWeightsSync(VllmDiskSync):
    """Sends wrong weights from the second sync on."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        wrong = {name: tensor * 1.05 for name, tensor in weights.items()}
        await super().push(weights if version == "0" else wrong, version)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
async def test_run_with_an_agent_program(
    url: str, polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Two steps with rollouts of an agent program. The calls of each step have its policy version.

    The agent always succeeds: a group without a scored rollout is not trained, and another one is started.
    """
    if wrong:
        monkeypatch.setattr("polar_proxy.training.weight_sync.VllmDiskSync", WrongWeightsSync)
    run = {"harness": "tests.fakes.tiny_agent:BriefAgent", "sandbox": "process", "max_tokens": 64, "timeout": 600.0}
    settings = load_settings(
        f"sqlite:///{tmp_path}/polar.db", engine={"kind": "vllm", "url": url, "model": "polar-tiny"}, run=run
    )
    config = GrpoConfig(
        groups=2, samples=2, steps=2, keep_zero_variance_groups=True, weights=str(POLAR_TINY), learning_rate=1e-4
    )
    reported: list[str] = []
    expectation = pytest.raises(TrainingError, match="differ by up to") if wrong else contextlib.nullcontext()
    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store:
        with expectation:
            await train_locally(settings, config, tmp_path / "run", store, reported.append)
        rollouts = await store.rollouts.find()
        by_version = {
            rollout.rollout_id: {call.weight_version for call in await store.calls.summaries(rollout.session_id)}
            for rollout in rollouts
            if rollout.session_id is not None
        }
    lines = list(metrics.read_lines(tmp_path / "run"))
    syncs = [line for line in lines if line["kind"] == "sync"]
    if wrong:
        assert [line["engine"] for line in syncs] == ["0"]
        return
    assert [line["engine"] for line in syncs] == ["0", "1", "2"]
    assert max(line["largest"] for line in syncs) < 1e-2
    assert sorted(version for versions in by_version.values() for version in versions) == ["0"] * 4 + ["1"] * 4
    steps = [line for line in lines if line["kind"] == "step"]
    assert max(line["mismatch_max"] for line in steps if line["updated"]) < 1e-2
    assert 0 < metrics.time_by_phase(lines)["engine_busy_share"] <= 1
