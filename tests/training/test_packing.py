"""Packs under a token budget, and their distribution over processes."""

from __future__ import annotations

import numpy as np
import pytest

from polar_proxy.training.policy.packing import Pack, assign_to_processes, pack_for_processes, pack_trees
from polar_proxy.training.policy.tree import build_tree
from tests.training.tree_factories import random_group


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def check_packs(packs: list[Pack], sequences: list[np.ndarray], budget: int) -> None:
    """Every sequence is in one pack and can be read along its path; no pack exceeds the budget."""
    assert sorted(index for pack in packs for index in pack.members) == list(range(len(sequences)))
    for pack in packs:
        assert len(pack.tree) <= budget
        for index, path in zip(pack.members, pack.tree.paths, strict=True):
            np.testing.assert_array_equal(pack.tree.token_ids[path], sequences[index])


def test_packs_by_hand() -> None:
    # Order: 1 2 3 | 1 2 4 | 1 5 | 9 9. Budget 5: 3 + 1 + 1 = 5 nodes, then 9 9 alone.
    sequences = [array(9, 9), array(1, 2, 3), array(1, 5), array(1, 2, 4)]
    packs = pack_trees(sequences, 5)
    assert [set(pack.members) for pack in packs] == [{1, 2, 3}, {0}]
    assert [len(pack.tree) for pack in packs] == [5, 2]
    # Budget 4: 1 2 3 and 1 2 4 need four nodes; 1 5 begins a pack with its prefix again: 2 + 2 nodes.
    assert [len(pack.tree) for pack in pack_trees(sequences, 4)] == [4, 4]


@pytest.mark.parametrize("seed", range(12))
def test_packs_of_random_groups(seed: int) -> None:
    sequences = random_group(seed).sequences
    longest = max(len(sequence) for sequence in sequences)
    whole = len(build_tree(sequences))
    for budget in (longest, longest + 7, 10_000):
        packs = pack_trees(sequences, budget)
        check_packs(packs, sequences, budget)
        assert whole <= sum(len(pack.tree) for pack in packs) <= sum(len(sequence) for sequence in sequences)
    assert [len(pack.tree) for pack in pack_trees(sequences, 10_000)] == [whole]


def test_assignment_to_processes_by_hand() -> None:
    # The largest first, always to the least loaded: 5 | 4, then 3 to the second, 2 to the first, 1 to the first.
    assert assign_to_processes([1, 2, 3, 4, 5], 2) == [[4, 1, 0], [3, 2]]
    assert assign_to_processes([7], 3) == [[0], [], []]


def test_packs_for_processes_trade_repeated_prefixes_for_parallel_work() -> None:
    # Four answers of 30 after a prompt of 4: one pack for each of two processes computes 64 nodes at a time, not 124.
    short = [np.concatenate([np.arange(4), np.full(30, 10 + n)]) for n in range(4)]
    assert [len(pack.tree) for pack in pack_for_processes(short, 1000, 2)] == [64, 64]
    # After a prompt of 200 the prompt outweighs the gain: 200 + 4 nodes twice is best.
    long = [np.concatenate([np.arange(200), np.full(2, 300 + n)]) for n in range(4)]
    assert [len(pack.tree) for pack in pack_for_processes(long, 1000, 2)] == [204, 204]
    assert [len(pack.tree) for pack in pack_for_processes(long, 1000, 1)] == [208]


@pytest.mark.parametrize("seed", range(4))
def test_packs_of_random_groups_for_several_processes(seed: int) -> None:
    sequences = random_group(seed, rollouts=6).sequences
    for processes in (1, 2, 5):
        packs = pack_for_processes(sequences, 200, processes)
        check_packs(packs, sequences, 200)
        assigned = assign_to_processes([len(pack.tree) for pack in packs], processes)
        assert sorted(index for own in assigned for index in own) == list(range(len(packs)))
        busiest = max(sum(len(packs[index].tree) for index in own) for own in assigned)
        assert busiest <= sum(len(pack.tree) for pack in pack_trees(sequences, 200))


def test_no_sequences_make_no_packs() -> None:
    assert pack_trees([], 5) == []


def test_calls_that_a_merged_trace_continues_add_no_node() -> None:
    merged = [array(1, 2, 3, 4, 5), array(1, 2, 6, 7, 8)]
    per_call = [array(1, 2, 3), array(1, 2, 3, 4, 5), array(1, 2, 6), array(1, 2, 6, 7, 8)]
    trees = [build_tree(sequences) for sequences in (merged, per_call)]
    assert [tree.token_ids.tolist() for tree in trees] == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2
    assert trees[0].positions.tolist() == trees[1].positions.tolist()
