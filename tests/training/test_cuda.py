"""The trainer on an NVIDIA GPU computes what it computes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polar_proxy.training import metrics
from polar_proxy.training.config import GrpoConfig, LoraSettings
from polar_proxy.training.policy.fsdp import ProcessSpec, ShardedLearner
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.policy.tree import build_tree, split_into_segments, tree_attention
from tests.training import bandit
from tests.training.test_fsdp import largest_difference
from tests.training.test_model import CONFIG, batch, learner
from tests.training.tree_factories import dense_mask, random_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and PyTorch with CUDA"),
]


def gradients(policy: Learner) -> dict[str, Tensor]:
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_and_gradients_equal_those_of_the_dense_mask(seed: int, heads: int) -> None:
    tree = build_tree(random_group(seed, vocabulary=1000, rollouts=6, longest=100 * (1 + seed % 2)).sequences)
    torch.manual_seed(seed)
    shapes = [(1, heads, len(tree), 64), (1, 2, len(tree), 64), (1, 2, len(tree), 64)]
    inputs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], device="cuda")
    output, _ = tree_attention(None, *inputs, None, tree_segments=split_into_segments(tree, "cuda"), scaling=0.1)
    output = output.transpose(1, 2)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = exact
    mask = dense_mask(tree).cuda()
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.1, enable_gqa=True)
    assert relative_error(output, expected) < 1e-5
    own = torch.autograd.grad((output * weights).sum(), inputs)
    true = torch.autograd.grad((expected * weights).sum(), exact)
    assert max(relative_error(*pair) for pair in zip(own, true, strict=True)) < 1e-5


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor - exact).detach().norm() / exact.detach().norm())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "loss": "gspo",
            "loss_aggregation": "rollout",
            "kl_coef": 0.1,
            "ppo_epochs": 2,
            "max_tokens_per_microbatch": 8,
        },
        {"loss": "tis", "echo_coef": 0.1},
        {"loss": "decoupled", "proximal": "interpolated"},
        {"lora": LoraSettings(rank=4)},
    ],
    ids=["dapo", "gspo", "echo", "decoupled", "lora"],
)
def test_an_update_equals_that_of_the_cpu(model: Path, settings: dict[str, Any]) -> None:
    step = batch(model, shift=-0.05, **settings)
    cpu, gpu = (learner(model, device=device, **settings) for device in ("cpu", "cuda"))
    expected, stats = cpu.update(step, 0), gpu.update(step, 0)
    assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    assert stats.mismatch_max == pytest.approx(expected.mismatch_max, abs=1e-4)
    assert stats.entropy == pytest.approx(expected.entropy, abs=1e-4)
    assert (stats.tokens, stats.computed_tokens) == (expected.tokens, expected.computed_tokens)
    # Not the weights: Adam divides by the size of the gradient, which enlarges the rounding of small gradients.
    largest = max(float(gradient.abs().max()) for gradient in gradients(cpu).values())
    assert largest_difference(gradients(gpu), gradients(cpu)) < 1e-3 * largest


def test_bfloat16_stays_near_float32(model: Path) -> None:
    step = batch(model, shift=-0.05)
    whole, half = learner(model, device="cuda"), learner(model, device="cuda", dtype="bfloat16")
    expected, stats = whole.update(step, 0), half.update(step, 0)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert stats.mismatch_mean == pytest.approx(0.05, abs=0.03)
    assert {tensor.dtype for tensor in half.weights().values()} == {torch.float32}


def test_restored_learner_takes_the_same_next_step(model: Path) -> None:
    step = batch(model, shift=-0.05)
    first = learner(model, device="cuda")
    first.update(step, 0)
    resumed = learner(model, device="cuda")
    resumed.restore({name: tensor.cpu() for name, tensor in first.weights().items()}, first.state())
    first.update(step, 1)
    resumed.update(step, 1)
    assert largest_difference(first.weights(), resumed.weights()) < 1e-6


@pytest.fixture
def sharded(tmp_path: Path, model: Path) -> Iterator[ShardedLearner]:
    config = CONFIG.model_copy(update={"device": "cuda", "processes": 1, "learning_rate": 1e-4})
    yield ShardedLearner(ProcessSpec(0, config, model, None, tmp_path / "rendezvous", threads=1))
    dist.destroy_process_group()


def test_fsdp_over_nccl_with_one_process_equals_the_plain_learner(model: Path, sharded: ShardedLearner) -> None:
    step, plain = batch(model, shift=-0.05), learner(model, device="cuda", learning_rate=1e-4)
    before = {name: tensor.clone() for name, tensor in plain.weights().items()}
    for number in range(2):
        expected, stats = plain.update(step, number), sharded.update(step, number)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    moved = largest_difference(plain.weights(), before)
    assert moved > 5e-5
    assert largest_difference(sharded.weights(), plain.weights()) < moved / 20


async def test_engine_gets_the_weights_that_the_gpu_trained(tmp_path: Path, model: Path) -> None:
    config = GrpoConfig(
        device="cuda", groups=1, samples=8, steps=2, learning_rate=1e-3, lease_seconds=60, wait_seconds=60
    )
    async with bandit.opened(tmp_path, model) as (store, engine):
        policy = Learner(load_model(model, "cuda"), config)
        state = await bandit.trainer(tmp_path, model, store, engine, config, learner=policy).train()
        assert (state.step, await engine.weight_version()) == (2, "2")
    syncs = [line for line in metrics.read_lines(tmp_path / "run") if line["kind"] == "sync"]
    assert len(syncs) == 3
    assert max(line["largest"] for line in syncs) < 1e-3
