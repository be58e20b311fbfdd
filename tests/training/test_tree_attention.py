"""Attention by branches: the same as attention under the tree's mask, and only where it can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from polar_proxy.training.attention import boolean_mask, model_inputs
from polar_proxy.training.branches import register_tree_attention, tree_attention, tree_segments
from polar_proxy.training.tree import pack_sequences, unshared
from tests.training.tree_factories import grown


def test_runs_by_hand() -> None:
    # 5 6 7 | 8 9 behind 5 6 | 4 alone: nodes 0-2, 3-4 with the past 0 1, 5.
    tree = pack_sequences([np.array([5, 6, 7]), np.array([5, 6, 8, 9]), np.array([4])])
    # Lexicographic order puts 4 first.
    assert [(run.start, run.stop, run.seen.tolist()) for run in tree_segments(tree)] == [
        (0, 1, [0]),
        (1, 4, [1, 2, 3]),
        (4, 6, [1, 2, 4, 5]),
    ]


def test_neighbours_that_only_look_like_a_chain_are_told_apart() -> None:
    """A root behind a root, and a branch that goes on one level below where the last one ended."""
    for sequences in ([[1], [2], [2]], [[1, 2], [1, 3, 4]], [[1, 2, 3], [1, 2, 4], [1, 5, 6, 7]]):
        tree = pack_sequences([np.array(sequence) for sequence in sequences])
        for run in tree_segments(tree):
            seen = boolean_mask(tree)[0, 0, run.stop - 1].nonzero().squeeze(1)
            assert run.seen.tolist() == seen.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_and_its_gradients_are_those_of_the_mask(seed: int, heads: int) -> None:
    lay_out = pack_sequences if seed % 2 else unshared
    tree = lay_out(grown(seed).sequences)
    torch.manual_seed(seed)
    shapes = [(1, heads, len(tree), 8), (1, 2, len(tree), 8), (1, 2, len(tree), 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64)
    got = tree_attention(*inputs, tree_segments(tree), scale=0.3)
    wanted = scaled_dot_product_attention(*inputs, attn_mask=boolean_mask(tree), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, wanted)
    slopes = torch.autograd.grad((got * weights).sum(), inputs)
    torch.testing.assert_close(slopes, torch.autograd.grad((wanted * weights).sum(), inputs))


def test_what_it_cannot_do_is_refused() -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = Qwen3Config(vocab_size=9, num_hidden_layers=1, attn_implementation=register_tree_attention(), **sizes)
    policy = Qwen3ForCausalLM(config)
    tree = pack_sequences([np.array([1, 2, 3])])
    inputs = model_inputs(tree, None)
    policy(**inputs, tree_segments=tree_segments(tree))
    with pytest.raises(ValueError, match="takes `tree_segments` and no mask"):
        policy(**inputs)
    with pytest.raises(ValueError, match="takes `tree_segments` and no mask"):
        policy(**model_inputs(tree, boolean_mask(tree)), tree_segments=tree_segments(tree))
    with pytest.raises(ValueError, match="a tree of 1 nodes, the model was given 3"):
        policy(**inputs, tree_segments=tree_segments(pack_sequences([np.array([1])])))
    policy.model.layers[0].self_attn.sliding_window = 2
    with pytest.raises(ValueError, match="no sliding window"):
        policy(**inputs, tree_segments=tree_segments(tree))
