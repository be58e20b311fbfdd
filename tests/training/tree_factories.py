"""Random runs of a group: sequences that share prompts, histories and, by chance, sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polar_proxy.training.tree import IntArray


@dataclass(frozen=True)
class Sample:
    """Sequences (token ids), what of each was sampled, and which rollout each belongs to."""

    sequences: list[IntArray]
    masks: list[IntArray]
    rollouts: list[int]


def grown(seed: int, *, vocabulary: int = 30, rollouts: int = 4, pieces: int = 4, longest: int = 6) -> Sample:
    """Rollouts behind one prompt: each a chain of context and answers, with branches that rewind to an earlier point.

    A branch keeps the answers it shares: they are marked as sampled in each of its rollout's sequences that hold
    them. With a small `vocabulary` rollouts share tokens by chance.
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
    return Sample(sequences, masks, owners)
