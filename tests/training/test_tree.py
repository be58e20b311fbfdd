"""The layout of prefix trees: every prefix once, every ancestor visible and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.training.policy.tree import PrefixTree, build_tree, find_targets
from tests.training.tree_factories import random_group, visibility

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def check_layout(tree: PrefixTree, sequences: list[np.ndarray]) -> None:
    """Each sequence can be read along its path, at its own positions, and sees exactly its own past."""
    visible = visibility(tree)
    for path, sequence in zip(tree.paths, sequences, strict=True):
        np.testing.assert_array_equal(tree.token_ids[path], sequence)
        np.testing.assert_array_equal(tree.positions[path], np.arange(len(sequence)))
        for offset, node in enumerate(path):
            np.testing.assert_array_equal(np.flatnonzero(visible[node]), path[: offset + 1])


def test_small_tree_by_hand() -> None:
    # 5 6 7, 5 6 8 9 and 5 6: nodes in preorder 5 6 7 8 9.
    tree = build_tree([array([5, 6, 7]), array([5, 6, 8, 9]), array([5, 6])])
    assert tree.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert tree.positions.tolist() == [0, 1, 2, 2, 3]
    assert tree.ends.tolist() == [5, 5, 3, 5, 5]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 1]]
    assert visibility(tree).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


@settings(deadline=None, max_examples=80)
@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_every_prefix_is_stored_once(lists: list[list[int]]) -> None:
    sequences = [array(tokens) for tokens in lists]
    tree = build_tree(sequences)
    check_layout(tree, sequences)
    prefixes = {tuple(tokens[: length + 1]) for tokens in lists for length in range(len(tokens))}
    assert len(tree) == len(prefixes)


def test_ids_are_compared_as_numbers() -> None:
    """Ids of several bytes, and ids whose bytes are the reverse of each other's, keep their order."""
    sequences = [array([256, 1]), array([1, 256]), array([65536]), array([1, 255]), array([150_000, 7])]
    check_layout(build_tree(sequences), sequences)


def test_rejects_empty_sequence() -> None:
    with pytest.raises(ValueError, match=r"are empty: \[1\]"):
        build_tree([array([1]), array([])])


def test_targets_by_hand() -> None:
    # Targets: 7 in 5 6 7; 6 and 8 in 5 6 8; 6 in 5 6. Nodes 5:0, 6:1, 7:2, 8:3 (preorder 5 6 7 8).
    tree = build_tree([array([5, 6, 7]), array([5, 6, 8]), array([5, 6])])
    targets = find_targets(tree, [np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([0, 1])])
    assert targets.token_ids.tolist() == [7, 6, 8, 6]
    assert targets.sequences.tolist() == [0, 1, 1, 2]
    assert targets.offsets.tolist() == [2, 1, 2, 1]
    # Logits are needed at two nodes only: node 0 predicts both 6, node 1 predicts 7 and 8.
    assert targets.rows.tolist() == [0, 1]
    assert targets.rows[targets.row_of].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("seed", range(10))
def test_every_masked_token_is_a_target(seed: int) -> None:
    group = random_group(seed, vocabulary=3)
    targets = find_targets(build_tree(group.sequences), group.masks)
    assert len(targets) == sum(int(mask.sum()) for mask in group.masks)
    for token, sequence, offset in zip(targets.token_ids, targets.sequences, targets.offsets, strict=True):
        assert group.masks[sequence][offset]
        assert group.sequences[sequence][offset] == token


def test_rejects_masks_that_do_not_fit() -> None:
    tree = build_tree([array([1, 2])])
    with pytest.raises(ValueError, match="no logits predict it"):
        find_targets(tree, [np.array([1, 1])])
    with pytest.raises(ValueError, match="has 2 tokens, its mask 3"):
        find_targets(tree, [np.array([0, 1, 1])])
    with pytest.raises(ValueError, match="0 masks for 1"):
        find_targets(tree, [])


def test_empty_mask_gives_no_targets() -> None:
    targets = find_targets(build_tree([array([1, 2])]), [np.array([0, 0])])
    assert (len(targets), len(targets.rows)) == (0, 0)
