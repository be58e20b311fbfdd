"""Packing: groups the sequences of an update into microbatches, and gives each token its weight.

`pack_trees` groups sequences under a budget of tokens, so that their common prefixes are computed once.
`make_microbatches` turns the packs into tensors. The weights of all tokens are decided over the whole update, so the
gradients of any number of microbatches add up to the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar_proxy.training.batch import TrainingSequence
from polar_proxy.training.loss_terms import LossAggregation, token_weights
from polar_proxy.training.tree import Ids, PrefixTree, Targets, build_tree, find_targets, sort_by_prefix


@dataclass(frozen=True, slots=True)
class Pack:
    """A tree, and the indices of the sequences in it: `tree.paths[i]` belongs to sequence `members[i]`."""

    tree: PrefixTree
    members: tuple[int, ...]


@dataclass(slots=True)
class Microbatch:
    """One forward and backward pass with m targets, s of them sampled; the others are observations (ECHO).

    All tensors are on the learner's device.
    """

    tree: PrefixTree
    targets: Targets
    sampled: Tensor
    """bool [m]"""
    observation_weights: Tensor
    """float64 [m]: the weight of each observation, 0 for sampled tokens."""
    old_logprobs: Tensor
    """float32 [s], nats, as the engine recorded them."""
    advantages: Tensor
    """float32 [s]"""
    sequences: Tensor
    """int64 [s]: index of the sequence within the update."""
    weights: Tensor
    """float64 [s]"""
    proximal_logprobs: Tensor | None = None
    """[s]: the trainer's log-probabilities before the step, once they are computed."""
    reference_logprobs: Tensor | None = None
    """[s]: the reference model's log-probabilities, if there is a reference."""

    def mismatch(self) -> tuple[float, float]:
        """Return sum and maximum of |trainer's log-probability before the step - recorded one|, nats."""
        assert self.proximal_logprobs is not None
        gap = (self.proximal_logprobs - self.old_logprobs).abs()
        return float(gap.sum()), float(gap.max())


def pack_trees(sequences: Sequence[Ids], max_tokens: int) -> list[Pack]:
    """Return packs of at most `max_tokens` nodes each, in which shared prefixes are stored once.

    Sequences are taken in lexicographic order, so that those that share most are neighbours; a prefix is computed again
    only where a new pack begins. Raises ValueError for a sequence longer than a pack.
    """
    _check_lengths(sequences, max_tokens)
    order, shared = sort_by_prefix(sequences)
    packs: list[list[int]] = []
    used = max_tokens + 1
    for index, common in zip(order, shared, strict=True):
        added = len(sequences[index]) - common
        if used + added > max_tokens:
            packs.append([])
            used, added = 0, len(sequences[index])
        packs[-1].append(index)
        used += added
    return [Pack(build_tree([sequences[index] for index in members]), tuple(members)) for members in packs]


def pack_for_processes(sequences: Sequence[Ids], max_tokens: int, processes: int) -> list[Pack]:
    """Return packs for several processes that compute at the same time (`assign_to_processes` distributes them).

    Smaller packs keep more processes busy but compute more prefixes again. Of a few sizes up to `max_tokens`, the one
    with the least work for the busiest process is chosen. Raises ValueError as `pack_trees` does.
    """
    _check_lengths(sequences, max_tokens)
    longest, nodes = max(map(len, sequences)), len(build_tree(sequences))
    # Some pack holds the whole longest sequence. Of the rest, try a quarter to three times the share of one process.
    shares = (-(-(nodes - longest) * quarters // (4 * processes)) for quarters in range(1, 13))
    sizes = {max_tokens} | {min(max_tokens, longest + share) for share in shares}
    candidates = [pack_trees(sequences, size) for size in sorted(sizes, reverse=True)]

    def busiest(packs: Sequence[Pack]) -> int:
        lengths = [len(pack.tree) for pack in packs]
        return max(sum(lengths[index] for index in own) for own in assign_to_processes(lengths, processes))

    return min(candidates, key=busiest)


def assign_to_processes(costs: Sequence[int], processes: int) -> list[list[int]]:
    """Return the indices of the costs that each process gets: the largest first, always to the least loaded.

    The result is deterministic, so that all processes compute the same assignment.
    """
    assigned: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        least = loads.index(min(loads))
        assigned[least].append(index)
        loads[least] += costs[index]
    return assigned


def make_microbatches(
    packs: Sequence[Pack],
    sequences: Sequence[TrainingSequence],
    *,
    aggregation: LossAggregation,
    length: int | None,
    observations: bool,
    device: torch.device,
) -> list[Microbatch]:
    """Return a microbatch for each pack of `sequences`.

    The weights of sampled tokens follow `aggregation` over all packs; observations (used by ECHO) all weigh the same.
    """
    masks = [one.trained | one.observed if observations else one.trained for one in sequences]
    # Each sampled token is in one sequence only (`make_batch` guarantees it), so every target counts once.
    targets = [find_targets(pack.tree, [masks[index] for index in pack.members]) for pack in packs]
    owners = [np.asarray(pack.members)[one.sequences] for pack, one in zip(packs, targets, strict=True)]
    sampled = [
        np.array([sequences[index].trained[at] for index, at in zip(owner, one.offsets, strict=True)], dtype=bool)
        for owner, one in zip(owners, targets, strict=True)
    ]
    all_sequences = torch.from_numpy(
        np.concatenate([owner[flags] for owner, flags in zip(owners, sampled, strict=True)])
    )
    all_rollouts = torch.tensor([sequence.rollout for sequence in sequences])[all_sequences]
    ones = torch.ones(len(all_sequences))
    all_weights = token_weights(ones, all_sequences, all_rollouts, aggregation=aggregation, length=length)
    weights = all_weights.split([int(flags.sum()) for flags in sampled])
    observed = sum(int((~flags).sum()) for flags in sampled)
    microbatches = []
    for pack, one, owner, flags, weight in zip(packs, targets, owners, sampled, weights, strict=True):
        own, offsets = owner[flags], one.offsets[flags]
        old_logprobs = [sequences[index].old_logprobs[at] for index, at in zip(own, offsets, strict=True)]
        microbatches.append(
            Microbatch(
                pack.tree,
                one,
                sampled=torch.from_numpy(flags).to(device),
                observation_weights=torch.from_numpy(~flags / max(1, observed)).to(device),
                old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32, device=device),
                advantages=torch.tensor([sequences[index].advantage for index in own], device=device).float(),
                sequences=torch.from_numpy(own).to(device),
                weights=weight.to(device),
            )
        )
    return microbatches


def _check_lengths(sequences: Sequence[Ids], max_tokens: int) -> None:
    if long := {index: len(sequence) for index, sequence in enumerate(sequences) if len(sequence) > max_tokens}:
        raise ValueError(f"sequences longer than a pack of {max_tokens} tokens (index: length): {long}")
