"""Attention by tree segments equals attention under the tree's dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from polar_proxy.training.policy.tree import (
    PrefixTree,
    build_tree,
    register_tree_attention,
    split_into_segments,
    tree_attention,
)
from tests.training.tree_factories import dense_mask, random_group, unshared_tree


def test_segments_by_hand() -> None:
    # 4 alone | 5 6 7 | 8 9 after 5 6. Lexicographic order puts 4 first.
    tree = build_tree([np.array([5, 6, 7]), np.array([5, 6, 8, 9]), np.array([4])])
    segments = split_into_segments(tree)
    assert [(segment.start, segment.stop, segment.visible.tolist()) for segment in segments] == [
        (0, 1, [0]),
        (1, 4, [1, 2, 3]),
        (4, 6, [1, 2, 4, 5]),
    ]


def test_neighbours_that_look_like_a_chain_are_separate_segments() -> None:
    """A root after a root, and a branch that starts one level below the last node of the one before."""
    for sequences in ([[1], [2], [2]], [[1, 2], [1, 3, 4]], [[1, 2, 3], [1, 2, 4], [1, 5, 6, 7]]):
        tree = build_tree([np.array(sequence) for sequence in sequences])
        for segment in split_into_segments(tree):
            visible = dense_mask(tree)[0, 0, segment.stop - 1].nonzero().squeeze(1)
            assert segment.visible.tolist() == visible.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_and_gradients_equal_those_of_the_dense_mask(seed: int, heads: int) -> None:
    make_tree = build_tree if seed % 2 else unshared_tree
    tree = make_tree(random_group(seed).sequences)
    torch.manual_seed(seed)
    shapes = [(1, heads, len(tree), 8), (1, 2, len(tree), 8), (1, 2, len(tree), 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64)
    output, _ = tree_attention(None, *inputs, None, tree_segments=split_into_segments(tree), scaling=0.3)
    output = output.transpose(1, 2)
    expected = scaled_dot_product_attention(*inputs, attn_mask=dense_mask(tree), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs))


def test_rejects_unsupported_calls() -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    config = Qwen3Config(vocab_size=9, num_hidden_layers=1, attn_implementation=register_tree_attention(), **sizes)
    policy = Qwen3ForCausalLM(config)
    tree = build_tree([np.array([1, 2, 3])])

    def run(segments: PrefixTree | None, mask: Tensor | None = None) -> None:
        more = {} if segments is None else {"tree_segments": split_into_segments(segments)}
        positions = torch.from_numpy(tree.positions)[None]
        policy(
            input_ids=torch.from_numpy(tree.token_ids)[None],
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            **more,
        )

    run(tree)
    with pytest.raises(ValueError, match="needs `tree_segments` and takes no mask"):
        run(None)
    with pytest.raises(ValueError, match="needs `tree_segments` and takes no mask"):
        run(tree, dense_mask(tree))
    with pytest.raises(ValueError, match="cover 1 nodes, but the model was given 3 tokens"):
        run(build_tree([np.array([1])]))
    policy.model.layers[0].self_attn.sliding_window = 2
    with pytest.raises(ValueError, match="no sliding window"):
        run(tree)
