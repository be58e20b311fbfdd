"""Which sequences are computed together, and what that costs: packs under a token budget, and the count of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar_proxy.training.tree import Ids, PrefixTree, pack_sequences, shared_prefixes, unshared


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass: a tree, and which of the given sequences its paths are (`tree.paths[i]` is `members[i]`)."""

    tree: PrefixTree
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """What one way of training costs: token positions put through the model, and pairs that attention compares."""

    tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The three ways on the same samples."""

    per_call: Computed
    merged: Computed
    tree: Computed

    @property
    def saved_over_per_call(self) -> float:
        """How many times fewer tokens the tree computes."""
        return self.per_call.tokens / self.tree.tokens

    @property
    def saved_over_merged(self) -> float:
        return self.merged.tokens / self.tree.tokens


def pack_trees(sequences: Sequence[Ids], max_tokens: int) -> list[Pack]:
    """Packs of at most `max_tokens` nodes each; what a pack's sequences share is in it once.

    Sequences are taken in lexicographic order, so that those that share most stand together; a prefix is computed again
    only where a new pack begins. Raises ValueError for a sequence that fits no pack.
    """
    _check(sequences, max_tokens)
    order, common = shared_prefixes(sequences)
    packs: list[list[int]] = []
    used = max_tokens + 1
    for index, shared in zip(order, common, strict=True):
        added = len(sequences[index]) - shared
        if used + added > max_tokens:
            packs.append([])
            used, added = 0, len(sequences[index])
        packs[-1].append(index)
        used += added
    return [Pack(pack_sequences([sequences[index] for index in members]), tuple(members)) for members in packs]


def pack_for_processes(sequences: Sequence[Ids], max_tokens: int, processes: int) -> list[Pack]:
    """Packs for several processes (`assign_to_processes` says which has which) that compute at the same time.

    Smaller packs keep more processes busy, and compute more prefixes again. Of a few sizes up to `max_tokens` the one
    is taken with which the busiest process computes least. Raises ValueError as `pack_trees` does.
    """
    _check(sequences, max_tokens)
    longest, nodes = max(map(len, sequences)), len(pack_sequences(sequences))
    # The longest is in some pack whole; of what is left each process has a quarter of its share up to three times it.
    shares = (-(-(nodes - longest) * quarters // (4 * processes)) for quarters in range(1, 13))
    sizes = {max_tokens} | {min(max_tokens, longest + share) for share in shares}
    tried = [pack_trees(sequences, size) for size in sorted(sizes, reverse=True)]

    def busiest(packs: Sequence[Pack]) -> int:
        lengths = [len(pack.tree) for pack in packs]
        return max(sum(lengths[index] for index in dealt) for dealt in assign_to_processes(lengths, processes))

    return min(tried, key=busiest)


def assign_to_processes(costs: Sequence[int], processes: int) -> list[list[int]]:
    """Which of the costs each process gets: the largest first, always to who has least. All processes find the same."""
    hands: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        least = loads.index(min(loads))
        hands[least].append(index)
        loads[least] += costs[index]
    return hands


def pack_flat(sequences: Sequence[Ids], max_tokens: int) -> list[Pack]:
    """Packs with nothing shared (the baseline): first fit, longest first. Raises ValueError as `pack_trees` does."""
    _check(sequences, max_tokens)
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        length = len(sequences[index])
        place = next((place for place, left in enumerate(room) if length <= left), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(max_tokens)
        packs[place].append(index)
        room[place] -= length
    return [Pack(unshared([sequences[index] for index in members]), tuple(members)) for members in packs]


def compare(per_call: Sequence[Ids], merged: Sequence[Ids]) -> Comparison:
    """Tokens and pairs computed by each builder's sequences and by the tree of the merged ones (one pack, no budget).

    `per_call` and `merged` hold the same samples: the traces of these two builders for the same rollouts.
    """
    return Comparison(_flat_cost(per_call), _flat_cost(merged), tree_cost(pack_sequences(merged)))


def tree_cost(tree: PrefixTree) -> Computed:
    """Every node once; a node at depth d is compared with d + 1 nodes."""
    return Computed(len(tree), int((tree.positions + 1).sum()))


def _flat_cost(sequences: Sequence[Ids]) -> Computed:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return Computed(int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum()))


def _check(sequences: Sequence[Ids], max_tokens: int) -> None:
    if long := {index: len(sequence) for index, sequence in enumerate(sequences) if len(sequence) > max_tokens}:
        raise ValueError(f"sequences longer than a pack of {max_tokens} tokens (index: length): {long}")
