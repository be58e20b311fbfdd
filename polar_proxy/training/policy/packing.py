"""Pack the sequences of an update into prefix trees of limited size, and make the tensors that the loss needs.

A pack is one pass through the model: a `PrefixTree`, in which a shared prefix is computed once. A `Microbatch` is a
pack with the tensors for its trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polar_proxy.training.batch import TrainingSequence
from polar_proxy.training.loss_names import LossAggregation
from polar_proxy.training.losses import token_weights
from polar_proxy.training.policy.tree import Ids, PrefixTree, Targets, build_tree, find_targets, sort_by_prefix


@dataclass(frozen=True, slots=True)
class Pack:
    """A prefix tree of some of the sequences of an update. `tree.paths[i]` is the path of sequence `members[i]`."""

    tree: PrefixTree
    members: tuple[int, ...]


def pack_trees(sequences: Sequence[Ids], max_tokens: int) -> list[Pack]:
    """Return packs of at most `max_tokens` nodes each, in which shared prefixes are stored once.

    Sequences are packed in lexicographic order, so that sequences with long common prefixes are neighbours. A prefix is
    computed again only where a new pack begins.
    """
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

    Smaller packs keep more processes busy but compute more prefixes again. Therefore a few pack sizes up to
    `max_tokens` are tried, and the size that gives the busiest process the least work is chosen.
    """
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
    """Distribute passes over processes, and return for each process the indices of its passes.

    `costs`: the cost of each pass. The passes are taken in order of falling cost, and each goes to the process with the
    least cost so far. The result is deterministic, so that all processes compute the same assignment.
    """
    assigned: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        least = loads.index(min(loads))
        assigned[least].append(index)
        loads[least] += costs[index]
    return assigned


@dataclass(slots=True)
class Microbatch:
    """One forward and backward pass over m target tokens, of which s were sampled.

    The other m - s are observations, the environment's answers, which only ECHO trains (`observation_loss`). All
    tensors but `temperatures` are on the learner's device.
    """

    tree: PrefixTree
    targets: Targets
    sampled: Tensor
    """bool [m]: True for a sampled target, False for an observation."""
    observations: int
    """Number of observed tokens in the whole update."""
    old_logprobs: Tensor
    """float32 [s], nats, as the engine recorded them."""
    advantages: Tensor
    """float32 [s]: advantage of each sampled token."""
    sequences: Tensor
    """int64 [s]: index of the sequence within the update."""
    weights: Tensor
    """float64 [s]: weight of each sampled token in the loss."""
    temperatures: Tensor
    """float64 [m]: temperature at which the target was sampled; 1 for observations. On the CPU."""
    versions: npt.NDArray[np.object_]
    """[s]: policy version that sampled the token; None if it is unknown."""
    proximal_logprobs: Tensor | None = None
    """[s]: log-probabilities of the proximal policy, once they are computed."""
    older_logprobs: Tensor | None = None
    """[s]: log-probabilities by the older weights that sampled the token; NaN for tokens of the current weights."""
    reference_logprobs: Tensor | None = None
    """[s]: the reference model's log-probabilities, if there is a reference."""


def make_microbatches(
    packs: Sequence[Pack],
    sequences: Sequence[TrainingSequence],
    *,
    aggregation: LossAggregation,
    max_rollout_tokens: int | None,
    with_observations: bool,
    device: torch.device,
) -> list[Microbatch]:
    """Return a microbatch for each pack of `sequences`.

    The weights of sampled tokens follow `aggregation` over all packs. So the gradients of any number of microbatches
    add up to the same update.
    """
    # Each sampled token is in one sequence only (`make_batch` guarantees it), so every target counts once.
    sampled_tokens = [int(sequence.trained.sum()) for sequence in sequences]
    sequence_of_token = [np.repeat(pack.members, [sampled_tokens[index] for index in pack.members]) for pack in packs]
    of_all_packs = torch.from_numpy(np.concatenate(sequence_of_token))
    rollout_of_token = torch.tensor([sequence.rollout for sequence in sequences])[of_all_packs]
    constants = None
    if max_rollout_tokens is not None:
        groups = len({sequence.group_id for sequence in sequences if sequence.trained.any()})
        group_sizes = torch.tensor([sequence.group_size for sequence in sequences])[of_all_packs]
        constants = groups * group_sizes * max_rollout_tokens
    all_weights = token_weights(of_all_packs, rollout_of_token, aggregation=aggregation, constants=constants)
    weights_of_packs = all_weights.split([len(indices) for indices in sequence_of_token])
    advantages = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    observations = sum(int(sequence.observed.sum()) for sequence in sequences)
    microbatches = []
    for pack, indices, weights in zip(packs, sequence_of_token, weights_of_packs, strict=True):
        members = [sequences[index] for index in pack.members]
        masks = [one.trained | one.observed if with_observations else one.trained for one in members]
        sampled = np.concatenate([one.trained[mask] for one, mask in zip(members, masks, strict=True)])
        old_logprobs = np.concatenate([one.old_logprobs[one.trained] for one in members])
        temperatures = np.concatenate([one.temperatures[mask] for one, mask in zip(members, masks, strict=True)])
        microbatches.append(
            Microbatch(
                pack.tree,
                find_targets(pack.tree, masks),
                sampled=torch.from_numpy(sampled).to(device),
                observations=observations,
                old_logprobs=torch.from_numpy(old_logprobs).to(device, torch.float32),
                advantages=advantages[indices].to(device),
                sequences=torch.from_numpy(indices).to(device),
                weights=weights.to(device),
                temperatures=torch.from_numpy(temperatures),
                versions=np.concatenate([one.versions[one.trained] for one in members]),
            )
        )
    return microbatches
