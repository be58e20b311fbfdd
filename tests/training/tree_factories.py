"""Random groups of sequences that share prompts, histories and, by chance, sampled tokens; and masks of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar_proxy.training.policy.tree import BoolArray, Ids, IntArray, PrefixTree


@dataclass(frozen=True)
class RandomGroup:
    """Sequences of token ids, masks of their sampled tokens, and the rollout of each sequence."""

    sequences: list[IntArray]
    masks: list[IntArray]
    rollouts: list[int]


def random_group(
    seed: int, *, vocabulary: int = 30, rollouts: int = 4, pieces: int = 4, longest: int = 6
) -> RandomGroup:
    """Return rollouts of one prompt: each a chain of context and answers, with branches from earlier points.

    A branch keeps the answers of its shared prefix, marked as sampled. With a small `vocabulary` rollouts also share
    tokens by chance.
    """
    random = np.random.default_rng(seed)

    def some(kind: int) -> tuple[IntArray, IntArray]:
        ids = random.integers(0, vocabulary, size=int(random.integers(1, longest + 1)))
        return ids, np.full(len(ids), kind)

    prompt = some(0)
    sequences, masks, owners = [], [], []
    for rollout in range(rollouts):
        made: list[tuple[IntArray, IntArray]] = []
        for _ in range(int(random.integers(1, 4))):
            ids, mask = prompt
            if made:
                ids, mask = made[int(random.integers(len(made)))]
                cut = int(random.integers(len(prompt[0]), len(ids) + 1))
                ids, mask = ids[:cut], mask[:cut]
            for kind in random.integers(0, 2, size=int(random.integers(1, pieces + 1))):
                more = some(int(kind))
                ids, mask = np.concatenate([ids, more[0]]), np.concatenate([mask, more[1]])
            made.append((ids, mask))
        for ids, mask in made:
            sequences.append(ids.astype(np.int64))
            masks.append(mask.astype(np.int64))
            owners.append(rollout)
    if not any(mask.any() for mask in masks):
        masks[0][-1] = 1
    return RandomGroup(sequences, masks, owners)


def visibility(tree: PrefixTree) -> BoolArray:
    """Return the attention mask, bool [n, n]: row q is True at the nodes that q attends to, itself included."""
    index = np.arange(len(tree))
    return (index[None, :] <= index[:, None]) & (index[:, None] < tree.ends[None, :])


def dense_mask(tree: PrefixTree) -> Tensor:
    """Return the mask for `scaled_dot_product_attention`, bool [1, 1, n, n]."""
    return torch.from_numpy(visibility(tree))[None, None]


def unshared_tree(sequences: Sequence[Ids]) -> PrefixTree:
    """Return a tree that holds the sequences one after the other and shares nothing."""
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum(lengths)
    return PrefixTree(
        token_ids=np.concatenate(sequences).astype(np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        ends=np.repeat(ends, lengths),
        paths=tuple(np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)),
    )
