"""The layout of trees: every prefix once, every ancestor visible and nothing else, every sample trained once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.training.tree import Branch, PrefixTree, pack_forest, pack_sequences, targets, unshared, visible
from tests.training.tree_factories import grown

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def check_layout(tree: PrefixTree, sequences: list[np.ndarray]) -> None:
    """Each sequence can be read along its path, at its own positions, and sees exactly its own past."""
    seen = visible(tree)
    for path, sequence in zip(tree.paths, sequences, strict=True):
        np.testing.assert_array_equal(tree.token_ids[path], sequence)
        np.testing.assert_array_equal(tree.positions[path], np.arange(len(sequence)))
        for place, node in enumerate(path):
            np.testing.assert_array_equal(np.flatnonzero(seen[node]), path[: place + 1])


def test_a_small_tree_by_hand() -> None:
    # 5 6 7, 5 6 8 9 and 5 6: nodes in preorder 5 6 7 8 9.
    tree = pack_sequences([array([5, 6, 7]), array([5, 6, 8, 9]), array([5, 6])])
    assert tree.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert tree.positions.tolist() == [0, 1, 2, 2, 3]
    assert tree.ends.tolist() == [5, 5, 3, 5, 5]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 1]]
    assert visible(tree).astype(int).tolist() == [
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
    tree = pack_sequences(sequences)
    check_layout(tree, sequences)
    prefixes = {tuple(tokens[: place + 1]) for tokens in lists for place in range(len(tokens))}
    assert len(tree) == len(prefixes)


def test_ids_are_compared_as_numbers() -> None:
    """Ids beyond one byte, and ids that are each other's bytes turned round, keep their order and their difference."""
    sequences = [array([256, 1]), array([1, 256]), array([65536]), array([1, 255]), array([150_000, 7])]
    check_layout(pack_sequences(sequences), sequences)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without a token: \[1\]"):
        pack_sequences([array([1]), array([])])


def test_an_explicit_forest_shares_what_it_says_and_no_more() -> None:
    # 1 2 3 4; behind 1 2 again 3 (equal, but another sample); behind 1 2 3 4 comes 5; a tree of its own: 1 2.
    branches = [
        Branch(array([1, 2, 3, 4])),
        Branch(array([3]), parent=0, branch_at=2),
        Branch(array([5]), parent=0, branch_at=4),
        Branch(array([1, 2])),
    ]
    tree = pack_forest(branches)
    check_layout(tree, [array([1, 2, 3, 4]), array([1, 2, 3]), array([1, 2, 3, 4, 5]), array([1, 2])])
    assert len(tree) == 4 + 1 + 1 + 2


def test_a_branch_may_leave_its_parent_above_the_parents_own_tokens() -> None:
    # The second leaves the first behind 1 2, the third leaves the second behind 1, which is the first's.
    branches = [
        Branch(array([1, 2, 3])),
        Branch(array([8, 9]), parent=0, branch_at=2),
        Branch(array([7]), parent=1, branch_at=1),
        Branch(array([6]), parent=1, branch_at=3),
        Branch(
            array(
                [],
            ),
            parent=1,
            branch_at=2,
        ),
    ]
    tree = pack_forest(branches)
    check_layout(tree, [array(ids) for ids in ([1, 2, 3], [1, 2, 8, 9], [1, 7], [1, 2, 8, 6], [1, 2])])
    assert len(tree) == 3 + 2 + 1 + 1


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9))
def test_explicit_forests_of_any_shape(drawn: list[tuple[list[int], int, int]]) -> None:
    branches: list[Branch] = []
    sequences: list[list[int]] = []
    for own, parent_draw, at_draw in drawn:
        parent = parent_draw % (len(branches) + 1) - 1
        if parent < 0:
            branches.append(Branch(array(own)))
            sequences.append(own)
        else:
            at = 1 + at_draw % len(sequences[parent])
            branches.append(Branch(array(own), parent, at))
            sequences.append(sequences[parent][:at] + own)
    tree = pack_forest(branches)
    check_layout(tree, [array(tokens) for tokens in sequences])
    assert len(tree) == sum(len(branch.token_ids) for branch in branches)


@pytest.mark.parametrize(
    ("branches", "why"),
    [
        ([Branch(array([1]), None, 1)], "no parent"),
        ([Branch(array([]))], "no parent"),
        ([Branch(array([1]), 0, 1)], "does not stand before it"),
        ([Branch(array([1])), Branch(array([2]), 0, 2)], "leaves its parent at 2"),
        ([Branch(array([1])), Branch(array([2]), 0, 0)], "leaves its parent at 0"),
    ],
)
def test_forests_that_cannot_be_are_refused(branches: list[Branch], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pack_forest(branches)


def test_unshared_sequences_do_not_see_each_other() -> None:
    sequences = [array([1, 2]), array([1, 2]), array([1, 3])]
    tree = unshared(sequences)
    assert len(tree) == 6
    check_layout(tree, sequences)


# What is trained ----------------------------------------------------------------------------------------------------


def test_targets_by_hand() -> None:
    # Rollout 0: 5 6 7* and 5 6* 8*; rollout 1: 5 6*. Nodes 5:0, 6:1, 7:2, 8:3 (preorder 5 6 7 8).
    tree = pack_sequences([array([5, 6, 7]), array([5, 6, 8]), array([5, 6])])
    wanted = targets(tree, [np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([0, 1])], rollouts=[0, 0, 1])
    assert wanted.token_ids.tolist() == [7, 6, 8, 6]
    assert wanted.nodes.tolist() == [2, 1, 3, 1]
    assert wanted.logits_at.tolist() == [1, 0, 1, 0]
    assert wanted.sequences.tolist() == [0, 1, 1, 2]
    assert wanted.offsets.tolist() == [2, 1, 2, 1]
    # The two 6 are of two rollouts: two samples. Logits are needed at two nodes only.
    assert wanted.weights.tolist() == [1, 1, 1, 1]
    assert wanted.rows.tolist() == [0, 1]
    assert wanted.rows[wanted.row_of].tolist() == wanted.logits_at.tolist()


def test_a_response_that_branches_of_one_rollout_share_is_trained_once() -> None:
    # Three sequences of rollout 0 hold the answer 2 3; one of rollout 1 sampled 2 as well.
    sequences = [array([1, 2, 3, 4]), array([1, 2, 3, 5]), array([1, 2, 3]), array([1, 2, 9])]
    masks = [np.array([0, 1, 1, 0]), np.array([0, 1, 1, 1]), np.array([0, 1, 1]), np.array([0, 1, 0])]
    wanted = targets(pack_sequences(sequences), masks, rollouts=[0, 0, 0, 1])
    third = 1 / 3
    np.testing.assert_allclose(wanted.weights, [third, third, third, third, 1, third, third, 1])
    # All the samples there are: 2, 3 and 5 of rollout 0, 2 of rollout 1.
    assert wanted.weights.sum() == pytest.approx(4)


def test_a_copy_that_is_context_takes_no_share() -> None:
    """Where only one trace trains an answer and the others hold it as context, it is trained whole."""
    sequences = [array([1, 2, 3]), array([1, 2, 4])]
    wanted = targets(pack_sequences(sequences), [np.array([0, 1, 0]), np.array([0, 0, 1])], rollouts=[0, 0])
    assert wanted.weights.tolist() == [1, 1]


def test_ids_of_samples_tell_equal_samples_apart() -> None:
    # One rollout sampled 2 twice behind the same prompt: two samples, though one node.
    sequences, masks = [array([1, 2, 3]), array([1, 2, 4])], [np.array([0, 1, 0]), np.array([0, 1, 0])]
    tree = pack_sequences(sequences)
    assert targets(tree, masks, rollouts=[0, 0]).weights.tolist() == [0.5, 0.5]
    ids = [np.array([-1, 10, -1]), np.array([-1, 11, -1])]
    assert targets(tree, masks, rollouts=[0, 0], samples=ids).weights.tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(10))
def test_the_weights_count_every_sample_once(seed: int) -> None:
    sample = grown(seed, vocabulary=3)
    tree = pack_sequences(sample.sequences)
    wanted = targets(tree, sample.masks, rollouts=sample.rollouts)
    distinct = {
        (rollout, tuple(sequence[: place + 1].tolist()))
        for sequence, mask, rollout in zip(sample.sequences, sample.masks, sample.rollouts, strict=True)
        for place in np.flatnonzero(mask)
    }
    assert wanted.weights.sum() == pytest.approx(len(distinct))
    assert len(wanted) == sum(int(mask.sum()) for mask in sample.masks)


def test_masks_that_do_not_fit_are_refused() -> None:
    tree = pack_sequences([array([1, 2])])
    with pytest.raises(ValueError, match="no logits predict it"):
        targets(tree, [np.array([1, 1])])
    with pytest.raises(ValueError, match="has 2 tokens, its mask 3"):
        targets(tree, [np.array([0, 1, 1])])
    with pytest.raises(ValueError, match="0 masks for 1"):
        targets(tree, [])


def test_nothing_sampled_gives_no_targets() -> None:
    wanted = targets(pack_sequences([array([1, 2])]), [np.array([0, 0])])
    assert (len(wanted), len(wanted.rows)) == (0, 0)
