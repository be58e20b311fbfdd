"""Training on a tree equals training on its sequences: the same loss and the same gradient of every parameter.

The reference puts each sequence through the model alone, with the model's own causal mask and position ids, and takes
its log-probabilities with `log_softmax`. It uses nothing of the tree.

Two architectures. GPT-2 keeps float64 throughout, so only the rounding of sums in another order is left: 1e-11.
Transformers' Qwen3 computes norms and rotary angles in float32 whatever the weights are: 1e-5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from polar_proxy.training.loss_names import LOSS_NAMES, LossAggregation
from polar_proxy.training.losses import LOSSES, LossInputs, token_weights
from polar_proxy.training.policy.packing import pack_trees
from polar_proxy.training.policy.tree import (
    ATTENTION_NAME,
    ENTROPY_ROWS,
    PrefixTree,
    Targets,
    build_tree,
    entropy_of_rows,
    find_targets,
    register_tree_attention,
    split_into_segments,
    target_logprobs,
)
from tests.training.tree_factories import RandomGroup, dense_mask, random_group

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 30
TOLERANCE = {"gpt2": 1e-11, "qwen3": 1e-5}
"""Allowed difference of gradients, as a share of the largest gradient."""
register_tree_attention()


def make_model(kind: str, attention: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return two layers with tied embeddings and random weights, large enough for sharp distributions."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "attn_implementation": attention}
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **common)).to(dtype).train()
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **common)).to(dtype).train()


class UpdateData:
    """Random old log-probabilities, advantages and weights for all targets of a group, sequence by sequence."""

    def __init__(self, group: RandomGroup, seed: int, aggregation: LossAggregation) -> None:
        random = np.random.default_rng(seed + 1000)
        self.targets = find_targets(build_tree(group.sequences), group.masks)
        n = len(self.targets)
        rollouts = torch.from_numpy(np.asarray(group.rollouts)[self.targets.sequences])
        self.sequences = torch.from_numpy(self.targets.sequences)
        self.old_logprobs = torch.from_numpy(random.uniform(-4.0, -1.0, size=n))
        self.proximal_logprobs = self.old_logprobs + torch.from_numpy(random.uniform(-0.5, 0.5, size=n))
        self.advantages = torch.from_numpy(random.normal(size=max(group.rollouts) + 1))[rollouts]
        self.weights = token_weights(self.sequences, rollouts, aggregation=aggregation)

    def loss_inputs(self, logprobs: Tensor, indices: Tensor) -> LossInputs:
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs[indices].to(logprobs.dtype),
            advantages=self.advantages[indices].to(logprobs.dtype),
            sequences=self.sequences[indices],
            proximal_logprobs=self.proximal_logprobs[indices].to(logprobs.dtype),
            weights=self.weights[indices],
            entropy=torch.zeros(len(indices)),
        )

    def indices(self, members: tuple[int, ...], targets: Targets) -> Tensor:
        """Return the positions of a pack's targets among all targets."""
        sequences = np.asarray(members)[targets.sequences]
        position = {
            pair: index for index, pair in enumerate(zip(self.targets.sequences, self.targets.offsets, strict=True))
        }
        return torch.tensor([position[pair] for pair in zip(sequences, targets.offsets, strict=True)])


def run_sequences(policy: Any, group: RandomGroup, data: UpdateData, loss: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients with each sequence computed by itself."""
    policy.zero_grad()
    total = 0.0
    for index, sequence in enumerate(group.sequences):
        indices = torch.nonzero(data.sequences == index).squeeze(1)
        if not len(indices):
            continue
        ids = torch.from_numpy(sequence)
        log_softmax = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        offsets = torch.from_numpy(data.targets.offsets)[indices]
        value, _ = LOSSES[loss](data.loss_inputs(log_softmax[offsets - 1, ids[offsets]], indices))
        value.backward()
        total += value.item()
    return total, gradients(policy)


def run_tree(
    policy: Any, members: tuple[int, ...], tree: PrefixTree, group: RandomGroup, data: UpdateData, loss: str
) -> float:
    """Run one pack forward and backward and return its loss; gradients add up in the model."""
    targets = find_targets(tree, [group.masks[index] for index in members])
    if not len(targets):
        return 0.0
    on_segments = policy.config._attn_implementation == ATTENTION_NAME
    attention = {"tree_segments": split_into_segments(tree)} if on_segments else {}
    output = policy(
        input_ids=torch.from_numpy(tree.token_ids)[None],
        position_ids=torch.from_numpy(tree.positions)[None],
        attention_mask=None if on_segments else dense_mask(tree),
        use_cache=False,
        logits_to_keep=torch.from_numpy(targets.rows),
        **attention,
    )
    ones = torch.ones(len(targets))
    inputs = data.loss_inputs(target_logprobs(output.logits[0], targets, ones), data.indices(members, targets))
    value, _ = LOSSES[loss](inputs)
    value.backward()
    return float(value.item())


def gradients(policy: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def all_members(group: RandomGroup) -> tuple[int, ...]:
    return tuple(range(len(group.sequences)))


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference over all parameters, as a share of the largest gradient."""
    assert left.keys() == right.keys()
    scale = max(float(value.abs().max()) for value in left.values())
    assert scale > 1e-4
    return max(float((left[name] - right[name]).abs().max()) for name in left) / scale


CASES = [("gpt2", ("sdpa", ATTENTION_NAME)[seed % 2], seed) for seed in range(12)]
CASES += [("qwen3", ("sdpa", ATTENTION_NAME)[seed % 2], seed) for seed in range(6)]


@pytest.mark.parametrize(("kind", "attention", "seed"), CASES)
def test_gradients_of_a_tree_equal_those_of_its_sequences(kind: str, attention: str, seed: int) -> None:
    """float64, random trees; another loss and another aggregation with every seed."""
    loss = sorted(set(LOSSES) - {"bapo"})[seed % 8]
    aggregation: LossAggregation = ("token", "sequence", "rollout")[seed % 3]  # type: ignore[assignment]
    group = random_group(seed, vocabulary=VOCABULARY if seed % 4 < 2 else 3)
    data, policy = UpdateData(group, seed, aggregation), make_model(kind, "eager", seed=seed)
    expected_loss, expected = run_sequences(policy, group, data, loss)
    policy.zero_grad()
    policy.set_attn_implementation(attention)
    tree = build_tree(group.sequences)
    assert len(tree) < sum(len(sequence) for sequence in group.sequences)
    tree_loss = run_tree(policy, all_members(group), tree, group, data, loss)
    assert tree_loss == pytest.approx(expected_loss, rel=TOLERANCE[kind], abs=TOLERANCE[kind])
    assert largest_difference(expected, gradients(policy)) < TOLERANCE[kind]


@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_in_float32(seed: int) -> None:
    group = random_group(seed + 50)
    data, policy = UpdateData(group, seed, "token"), make_model("qwen3", "sdpa", torch.float32, seed)
    expected_loss, expected = run_sequences(policy, group, data, "ppo_clip")
    policy.zero_grad()
    policy.set_attn_implementation(ATTENTION_NAME)
    tree_loss = run_tree(policy, all_members(group), build_tree(group.sequences), group, data, "ppo_clip")
    assert tree_loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
    assert largest_difference(expected, gradients(policy)) < 1e-4


def test_gradients_of_packs_add_up() -> None:
    """A budget that cuts the tree: prefixes are computed again, gradients stay the same."""
    group = random_group(7, rollouts=5)
    data, policy = UpdateData(group, 7, "rollout"), make_model("gpt2", "sdpa")
    expected_loss, expected = run_sequences(policy, group, data, "gspo")
    policy.zero_grad()
    policy.set_attn_implementation(ATTENTION_NAME)
    packs = pack_trees(group.sequences, max(len(sequence) for sequence in group.sequences) + 5)
    assert len(packs) > 2
    total = sum(run_tree(policy, pack.members, pack.tree, group, data, "gspo") for pack in packs)
    assert total == pytest.approx(expected_loss, rel=1e-11)
    assert largest_difference(expected, gradients(policy)) < 1e-11


def test_gradients_differ_with_a_wrong_mask_or_wrong_positions() -> None:
    group = random_group(1)
    data, policy = UpdateData(group, 1, "token"), make_model("gpt2", "sdpa")
    _, expected = run_sequences(policy, group, data, "ppo_clip")
    tree = build_tree(group.sequences)
    plain_causal = PrefixTree(tree.token_ids, tree.positions, np.full(len(tree), len(tree)), tree.paths)
    plain_positions = PrefixTree(tree.token_ids, np.arange(len(tree)), tree.ends, tree.paths)
    for wrong in (plain_causal, plain_positions):
        policy.zero_grad()
        run_tree(policy, all_members(group), wrong, group, data, "ppo_clip")
        assert largest_difference(expected, gradients(policy)) > 1e-2


def test_entropy_of_many_rows_equals_torch() -> None:
    scores = 3 * torch.randn(2 * ENTROPY_ROWS + 7, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(entropy_of_rows(scores), expected)


def test_target_logprobs_by_hand() -> None:
    # Logits log 1, log 3: probabilities 1/4, 3/4. At temperature 1/2 they are squared: 1/10, 9/10.
    tree = build_tree([np.array([0, 0]), np.array([0, 1])])
    targets = find_targets(tree, [np.array([0, 1]), np.array([0, 1])])
    logits = torch.tensor([[1.0, 3.0]]).log()
    ones = torch.ones(2)
    assert target_logprobs(logits, targets, ones).exp().tolist() == pytest.approx([1 / 4, 3 / 4])
    assert target_logprobs(logits, targets, ones / 2).exp().tolist() == pytest.approx([1 / 10, 9 / 10])
    mixed = target_logprobs(logits, targets, torch.tensor([1.0, 0.5]))
    assert mixed.exp().tolist() == pytest.approx([1 / 4, 9 / 10])
    assert target_logprobs(logits.bfloat16(), targets, ones).dtype == torch.float32
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        target_logprobs(torch.zeros(2, 3), targets, ones)


def test_the_settings_know_every_loss() -> None:
    assert tuple(LOSSES) == LOSS_NAMES
