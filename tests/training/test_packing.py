"""Packs under a budget, and what the three ways of training compute."""

from __future__ import annotations

import numpy as np
import pytest

from polar_proxy.training.packing import (
    Pack,
    assign_to_processes,
    compare,
    pack_flat,
    pack_for_processes,
    pack_trees,
    tree_cost,
)
from polar_proxy.training.tree import pack_sequences
from tests.training.tree_factories import grown


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def check_packs(packs: list[Pack], sequences: list[np.ndarray], budget: int) -> None:
    """Every sequence in one pack, readable along its path; no pack above the budget."""
    assert sorted(index for pack in packs for index in pack.members) == list(range(len(sequences)))
    for pack in packs:
        assert len(pack.tree) <= budget
        for index, path in zip(pack.members, pack.tree.paths, strict=True):
            np.testing.assert_array_equal(pack.tree.token_ids[path], sequences[index])


def test_tree_packs_by_hand() -> None:
    # Order: 1 2 3 | 1 2 4 | 1 5 | 9 9. Budget 5: 3 + 1 + 1 = 5 nodes, then 9 9 alone.
    sequences = [array(9, 9), array(1, 2, 3), array(1, 5), array(1, 2, 4)]
    packs = pack_trees(sequences, 5)
    assert [set(pack.members) for pack in packs] == [{1, 2, 3}, {0}]
    assert [len(pack.tree) for pack in packs] == [5, 2]
    # Budget 4: 1 2 3 and 1 2 4 make four nodes; 1 5 begins a pack and takes its prefix along: 2 + 2 nodes.
    assert [len(pack.tree) for pack in pack_trees(sequences, 4)] == [4, 4]


def test_flat_packs_by_hand() -> None:
    # Lengths 3 3 2 2, budget 5: first fit from the longest: 3 + 2, 3 + 2. Nothing is shared.
    sequences = [array(9, 9), array(1, 2, 3), array(1, 5), array(1, 2, 4)]
    assert [len(pack.tree) for pack in pack_flat(sequences, 5)] == [5, 5]


@pytest.mark.parametrize("seed", range(12))
def test_packs_of_random_groups(seed: int) -> None:
    sequences = grown(seed).sequences
    longest = max(len(sequence) for sequence in sequences)
    whole = len(pack_sequences(sequences))
    for budget in (longest, longest + 7, 10_000):
        trees, flat = pack_trees(sequences, budget), pack_flat(sequences, budget)
        check_packs(trees, sequences, budget)
        check_packs(flat, sequences, budget)
        assert whole <= sum(len(pack.tree) for pack in trees) <= sum(len(sequence) for sequence in sequences)
    assert [len(pack.tree) for pack in pack_trees(sequences, 10_000)] == [whole]


def test_dealt_by_hand() -> None:
    # The largest first, always to who has least: 5 | 4, then 3 to the second, 2 to the first, 1 to either.
    assert assign_to_processes([1, 2, 3, 4, 5], 2) == [[4, 1, 0], [3, 2]]
    assert assign_to_processes([7], 3) == [[0], [], []]


def test_packs_for_several_processes_weigh_the_prefix_against_the_wait() -> None:
    # Four answers of 30 behind a prompt of 4: a pack for each of two processes computes 64 nodes at a time, not 124.
    short = [np.concatenate([np.arange(4), np.full(30, 10 + n)]) for n in range(4)]
    assert [len(pack.tree) for pack in pack_for_processes(short, 1000, 2)] == [64, 64]
    # Behind a prompt of 200 the prompt outweighs what could be gained: 200 + 4 twice is the best, whoever else waits.
    long = [np.concatenate([np.arange(200), np.full(2, 300 + n)]) for n in range(4)]
    assert [len(pack.tree) for pack in pack_for_processes(long, 1000, 2)] == [204, 204]
    assert [len(pack.tree) for pack in pack_for_processes(long, 1000, 1)] == [208]


@pytest.mark.parametrize("seed", range(4))
def test_packs_of_random_groups_for_several_processes(seed: int) -> None:
    sequences = grown(seed, rollouts=6).sequences
    for processes in (1, 2, 5):
        packs = pack_for_processes(sequences, 200, processes)
        check_packs(packs, sequences, 200)
        hands = assign_to_processes([len(pack.tree) for pack in packs], processes)
        assert sorted(index for hand in hands for index in hand) == list(range(len(packs)))
        busiest = max(sum(len(packs[index].tree) for index in hand) for hand in hands)
        assert busiest <= sum(len(pack.tree) for pack in pack_trees(sequences, 200))


def test_what_fits_no_pack_is_refused() -> None:
    for pack in (pack_trees, pack_flat, lambda sequences, size: pack_for_processes(sequences, size, 2)):
        with pytest.raises(ValueError, match=r"\{1: 3\}"):
            pack([array(1), array(1, 2, 3)], 2)


def test_no_sequences_make_no_packs() -> None:
    assert pack_trees([], 5) == []
    assert pack_flat([], 5) == []


def test_cost_by_hand() -> None:
    # Two rollouts of two turns behind the prompt 1 2: rollout a answers 3, is told 4, answers 5; b: 6, 7, 8.
    merged = [array(1, 2, 3, 4, 5), array(1, 2, 6, 7, 8)]
    per_call = [array(1, 2, 3), array(1, 2, 3, 4, 5), array(1, 2, 6), array(1, 2, 6, 7, 8)]
    cost = compare(per_call, merged)
    # Tokens 3 + 5 + 3 + 5, 5 + 5, 2 + 3 + 3. Pairs 6 + 15 + 6 + 15; 15 + 15; 1 + 2 and twice 3 + 4 + 5.
    assert (cost.per_call.tokens, cost.merged.tokens, cost.tree.tokens) == (16, 10, 8)
    assert (cost.per_call.pairs, cost.merged.pairs, cost.tree.pairs) == (42, 30, 27)
    assert cost.saved_over_per_call == pytest.approx(2.0)
    assert cost.saved_over_merged == pytest.approx(1.25)


def test_the_trees_of_both_builders_cost_the_same() -> None:
    """Calls that a merged trace continues add no node: the tree of the calls is the tree of the merged traces."""
    merged = [array(1, 2, 3, 4, 5), array(1, 2, 6, 7, 8)]
    per_call = [array(1, 2, 3), array(1, 2, 3, 4, 5), array(1, 2, 6), array(1, 2, 6, 7, 8)]
    assert tree_cost(pack_sequences(per_call)) == tree_cost(pack_sequences(merged))
