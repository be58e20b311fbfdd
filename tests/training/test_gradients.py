"""Training on a tree is training on its sequences: the same loss and the same gradient of every parameter.

The reference puts each sequence through the model alone, with the model's own causal mask and position ids, and takes
its log-probabilities with `log_softmax`. Nothing of the tree is used in it but the shares of copies of one sample.

Two architectures. GPT-2 keeps float64 throughout, so what is left is the rounding of sums in another order: 1e-11.
Transformers' Qwen3 takes norms, rotary angles and (eager) softmax in float32 whatever the weights are: 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from polar_proxy.training.algorithms import LOSSES
from polar_proxy.training.attention import (
    additive_mask,
    block_mask,
    boolean_mask,
    mask_mod,
    model_inputs,
    target_logprobs,
)
from polar_proxy.training.branches import register_tree_attention, tree_segments
from polar_proxy.training.loss_terms import LossAggregation, token_weights
from polar_proxy.training.packing import pack_flat, pack_trees
from polar_proxy.training.tokens import LossInputs
from polar_proxy.training.tree import (
    Branch,
    PrefixTree,
    Targets,
    pack_forest,
    pack_sequences,
    targets,
    unshared,
    visible,
)
from tests.training.tree_factories import Sample, grown

VOCABULARY = 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are only slowed down by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROUNDING = {"gpt2": 1e-11, "qwen3": 1e-5}
"""What gradients may differ by, as a share of the largest."""


def model(kind: str, attention: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Two layers with tied embeddings and random weights, large enough for sharp distributions."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "attn_implementation": attention}
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
        off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **off, **common)).to(dtype).train()
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **common)).to(dtype).train()


class Step:
    """What a training step knows of a sample, in the order of `targets`: recorded values, advantages, weights."""

    def __init__(self, sample: Sample, seed: int, how: LossAggregation) -> None:
        random = np.random.default_rng(seed + 1000)
        self.wanted = targets(unshared(sample.sequences), sample.masks, rollouts=sample.rollouts)
        shares = targets(pack_sequences(sample.sequences), sample.masks, rollouts=sample.rollouts).weights
        rollouts = np.asarray(sample.rollouts)[self.wanted.sequences]
        self.sequences = torch.from_numpy(self.wanted.sequences)
        self.recorded = torch.from_numpy(random.uniform(-4.0, -1.0, size=len(self.wanted)))
        self.proximal = self.recorded + torch.from_numpy(random.uniform(-0.5, 0.5, size=len(self.wanted)))
        self.advantages = torch.from_numpy(random.normal(size=max(sample.rollouts) + 1))[torch.from_numpy(rollouts)]
        shares_tensor = torch.from_numpy(shares)
        self.weights = token_weights(shares_tensor, self.sequences, torch.from_numpy(rollouts), how=how)

    def tokens(self, new: Tensor, places: Tensor) -> LossInputs:
        def here(values: Tensor) -> Tensor:
            return values[places]

        return LossInputs(
            new=new,
            recorded=here(self.recorded).to(new.dtype),
            advantages=here(self.advantages).to(new.dtype),
            mask=torch.ones(len(places)).bool(),
            sequences=here(self.sequences),
            proximal=here(self.proximal).to(new.dtype),
            weights=here(self.weights),
        )


def reference(policy: Any, sample: Sample, step: Step, loss: str) -> tuple[float, dict[str, Tensor]]:
    """Each sequence by itself."""
    policy.zero_grad()
    total = 0.0
    for index, sequence in enumerate(sample.sequences):
        places = torch.nonzero(step.sequences == index).squeeze(1)
        if not len(places):
            continue
        ids = torch.from_numpy(sequence)
        logprobs = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        offsets = torch.from_numpy(step.wanted.offsets)[places]
        value, _ = LOSSES[loss](step.tokens(logprobs[offsets - 1, ids[offsets]], places))
        value.backward()
        total += value.item()
    return total, gradients(policy)


def packed(
    policy: Any,
    members: tuple[int, ...],
    tree: PrefixTree,
    sample: Sample,
    step: Step,
    loss: str,
    mask: Callable[[PrefixTree], Any],
) -> float:
    """One pack, forward and backward; gradients add up in the model."""
    wanted = targets(tree, [sample.masks[index] for index in members])
    if not len(wanted):
        return 0.0
    inputs = model_inputs(tree, None if mask is tree_segments else mask(tree))
    if mask is tree_segments:
        inputs["tree_segments"] = tree_segments(tree)
    logits = policy(**inputs, logits_to_keep=torch.from_numpy(wanted.rows)).logits[0]
    places = torch.from_numpy(places_of(step, members, wanted))
    value, _ = LOSSES[loss](step.tokens(target_logprobs(logits, wanted), places))
    value.backward()
    return float(value.item())


def places_of(step: Step, members: tuple[int, ...], wanted: Targets) -> np.ndarray:
    """Where the pack's targets stand among all of the step."""
    sequences = np.asarray(members)[wanted.sequences]
    where = {pair: place for place, pair in enumerate(zip(step.wanted.sequences, step.wanted.offsets, strict=True))}
    return np.array([where[pair] for pair in zip(sequences, wanted.offsets, strict=True)])


def gradients(policy: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def whole(sample: Sample) -> tuple[int, ...]:
    return tuple(range(len(sample.sequences)))


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Over all parameters, as a share of the largest gradient."""
    assert left.keys() == right.keys()
    scale = max(float(value.abs().max()) for value in left.values())
    assert scale > 1e-4
    return max(float((left[name] - right[name]).abs().max()) for name in left) / scale


MASKS: dict[str, Callable[[PrefixTree], Any]] = {
    "eager": lambda tree: additive_mask(tree, torch.float64),
    "sdpa": boolean_mask,
    register_tree_attention(): tree_segments,
}


CASES = [("gpt2", sorted(MASKS)[seed % 3], seed) for seed in range(12)]
CASES += [("qwen3", sorted(MASKS)[seed % 3], seed) for seed in range(6)]


@pytest.mark.parametrize(("kind", "attention", "seed"), CASES)
def test_a_tree_has_the_gradient_of_its_sequences(kind: str, attention: str, seed: int) -> None:
    """float64, random trees; another loss and another normalisation with every seed."""
    loss = sorted(set(LOSSES) - {"bapo"})[seed % 8]
    how: LossAggregation = ("token", "sequence", "rollout")[seed % 3]  # type: ignore[assignment]
    sample = grown(seed, vocabulary=VOCABULARY if seed % 4 < 2 else 3)
    step, policy = Step(sample, seed, how), model(kind, "eager", seed=seed)
    wanted_loss, wanted = reference(policy, sample, step, loss)
    policy.zero_grad()
    policy.set_attn_implementation(attention)
    tree = pack_sequences(sample.sequences)
    assert len(tree) < sum(len(sequence) for sequence in sample.sequences)
    got_loss = packed(policy, whole(sample), tree, sample, step, loss, MASKS[attention])
    assert got_loss == pytest.approx(wanted_loss, rel=ROUNDING[kind], abs=ROUNDING[kind])
    assert largest_difference(wanted, gradients(policy)) < ROUNDING[kind]


@pytest.mark.parametrize("seed", range(3))
def test_in_float32_they_agree_to_rounding(seed: int) -> None:
    sample = grown(seed + 50)
    step, policy = Step(sample, seed, "token"), model("qwen3", "sdpa", torch.float32, seed)
    wanted_loss, wanted = reference(policy, sample, step, "ppo_clip")
    policy.zero_grad()
    tree = pack_sequences(sample.sequences)
    got_loss = packed(policy, whole(sample), tree, sample, step, "ppo_clip", boolean_mask)
    assert got_loss == pytest.approx(wanted_loss, rel=1e-4, abs=1e-5)
    assert largest_difference(wanted, gradients(policy)) < 1e-4


@pytest.mark.parametrize("pack", [pack_trees, pack_flat])
def test_packs_of_a_step_add_up_to_the_step(pack: Callable[..., Any]) -> None:
    """A budget that cuts the tree: prefixes are computed again, gradients stay the same."""
    sample = grown(7, rollouts=5)
    step, policy = Step(sample, 7, "rollout"), model("gpt2", "sdpa")
    wanted_loss, wanted = reference(policy, sample, step, "gspo")
    policy.zero_grad()
    packs = pack(sample.sequences, max(len(sequence) for sequence in sample.sequences) + 5)
    assert len(packs) > 2
    total = sum(packed(policy, one.members, one.tree, sample, step, "gspo", boolean_mask) for one in packs)
    assert total == pytest.approx(wanted_loss, rel=1e-11)
    assert largest_difference(wanted, gradients(policy)) < 1e-11


def test_an_explicit_forest_has_the_gradient_of_its_sequences() -> None:
    prompt, left, right = np.array([1, 2, 3]), np.array([4, 5]), np.array([4, 6, 7])
    branches = [
        Branch(np.concatenate([prompt, left])),
        Branch(right, parent=0, branch_at=3),
        Branch(np.array([9]), parent=1, branch_at=5),
        Branch(np.array([1, 2, 8])),
    ]
    tree = pack_forest(branches)
    sequences = [tree.token_ids[path] for path in tree.paths]
    masks = [np.array([0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1, 1]), np.array([0] * 5 + [1]), np.array([0, 0, 1])]
    sample = Sample(sequences, masks, [0, 0, 0, 1])
    step, policy = Step(sample, 3, "token"), model("gpt2", "sdpa")
    wanted_loss, wanted = reference(policy, sample, step, "ppo_clip")
    policy.zero_grad()
    assert packed(policy, whole(sample), tree, sample, step, "ppo_clip", boolean_mask) == pytest.approx(wanted_loss)
    assert largest_difference(wanted, gradients(policy)) < 1e-11


def test_mask_and_positions_are_what_makes_it_exact() -> None:
    """With a plain causal mask, or positions in a row, the same comparison fails by far."""
    sample = grown(1)
    step, policy = Step(sample, 1, "token"), model("gpt2", "sdpa")
    _, wanted = reference(policy, sample, step, "ppo_clip")
    tree = pack_sequences(sample.sequences)
    causal = PrefixTree(tree.token_ids, tree.positions, np.full(len(tree), len(tree)), tree.paths)
    in_a_row = PrefixTree(tree.token_ids, np.arange(len(tree)), tree.ends, tree.paths)
    for wrong in (causal, in_a_row):
        policy.zero_grad()
        packed(policy, whole(sample), wrong, sample, step, "ppo_clip", boolean_mask)
        assert largest_difference(wanted, gradients(policy)) > 1e-2


def test_target_logprobs_by_hand() -> None:
    # Logits log 1, log 3: probabilities 1/4, 3/4. At temperature 1/2 they are squared: 1/10, 9/10.
    tree = pack_sequences([np.array([0, 0]), np.array([0, 1])])
    wanted = targets(tree, [np.array([0, 1]), np.array([0, 1])])
    logits = torch.tensor([[1.0, 3.0]]).log()
    assert target_logprobs(logits, wanted).exp().tolist() == pytest.approx([1 / 4, 3 / 4])
    assert target_logprobs(logits, wanted, temperature=0.5).exp().tolist() == pytest.approx([1 / 10, 9 / 10])
    assert target_logprobs(logits.bfloat16(), wanted).dtype == torch.float32
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        target_logprobs(torch.zeros(2, 3), wanted)


# FlexAttention ------------------------------------------------------------------------------------------------------


def test_flex_attention_has_the_same_mask() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    tree = pack_sequences(grown(4).sequences)
    n = len(tree)
    dense = flex.create_mask(mask_mod(torch.from_numpy(tree.ends)), 1, 1, n, n, device="cpu")
    np.testing.assert_array_equal(dense[0, 0].numpy(), visible(tree))


def flex_and_sdpa(tree: PrefixTree, device: str, gradient: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output, and the gradients of query, key and value, by FlexAttention and by SDPA."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch.manual_seed(0)
    shape, dtype = (1, 2, len(tree), 32), torch.float32 if device == "cuda" else torch.float64
    inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=gradient) for _ in range(3)]
    weights = torch.randn(shape, dtype=dtype, device=device)
    attend = torch.compile(flex.flex_attention) if device == "cuda" else flex.flex_attention
    results = []
    for output in (
        attend(*inputs, block_mask=block_mask(tree, device)),
        torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=boolean_mask(tree, device)),
    ):
        slopes = torch.autograd.grad((output * weights).sum(), inputs) if gradient else ()
        results.append([output.detach(), *slopes])
    return results[0], results[1]


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
def test_flex_attention_attends_as_sdpa_does() -> None:
    """FlexAttention's unfused reference over more than one block of 128; it has no backward pass on CPU."""
    tree = pack_sequences(grown(5, rollouts=12, pieces=6, longest=9).sequences)
    assert len(tree) > 256
    got, wanted = flex_and_sdpa(tree, "cpu", gradient=False)
    torch.testing.assert_close(got, wanted)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="FlexAttention has a backward pass on GPUs only: run it on one"
)
def test_flex_attention_has_the_gradients_of_sdpa() -> None:
    got, wanted = flex_and_sdpa(pack_sequences(grown(5, rollouts=12, pieces=6, longest=9).sequences), "cuda", True)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-3)
