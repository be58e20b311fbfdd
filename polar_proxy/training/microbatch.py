"""What one update puts through the model: packs of sequences, which of their tokens are trained, what each weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar_proxy.training.batch import TrainingSequence
from polar_proxy.training.loss_terms import LossAggregation, token_weights
from polar_proxy.training.packing import Pack
from polar_proxy.training.tree import Targets, targets


@dataclass(slots=True)
class Microbatch:
    """One forward pass, of m targets: s sampled tokens, the others observed ones. Tensors are on the device."""

    pack: Pack
    wanted: Targets
    sampled: Tensor
    """bool [m]"""
    observed: Tensor
    """float64 [m]: what each observed token weighs, 0 where one was sampled."""
    recorded: Tensor
    """float32 [s], nats, as recorded at sampling."""
    advantages: Tensor
    """float32 [s]"""
    sequences: Tensor
    """int64 [s]: the number of its sequence within the update."""
    weights: Tensor
    """float64 [s]"""
    proximal: Tensor | None = None
    """[s]: the trainer's own log-probabilities before the step, once they are known."""
    reference: Tensor | None = None
    """[s]: the reference's, where there is one."""

    def mismatch(self) -> tuple[float, float]:
        """Sum and largest of |the trainer's own before the step - recorded|, nats."""
        assert self.proximal is not None
        gap = (self.proximal - self.recorded).abs()
        return float(gap.sum()), float(gap.max())


def make_microbatches(
    packs: Sequence[Pack],
    sequences: Sequence[TrainingSequence],
    *,
    how: LossAggregation,
    length: int | None,
    observations: bool,
    device: torch.device,
) -> list[Microbatch]:
    """A pass for each pack of `sequences`. What a token weighs is decided over all of them: sampled ones as `how` says,
    observed ones, if they are wanted, all alike."""
    masks = [one.trained | one.observed if observations else one.trained for one in sequences]
    # Each sampled token stands in one sequence only (`make_batch` sees to it): every target weighs 1 before
    # normalisation, on whatever node it is.
    wanted = [targets(pack.tree, [masks[index] for index in pack.members]) for pack in packs]
    places = [np.asarray(pack.members)[one.sequences] for pack, one in zip(packs, wanted, strict=True)]
    sampled = [
        np.array([sequences[index].trained[at] for index, at in zip(place, one.offsets, strict=True)], dtype=bool)
        for place, one in zip(places, wanted, strict=True)
    ]
    owners = torch.from_numpy(np.concatenate([place[flags] for place, flags in zip(places, sampled, strict=True)]))
    rollouts = torch.tensor([sequence.rollout for sequence in sequences])[owners]
    weights = token_weights(torch.ones(len(owners)), owners, rollouts, how=how, length=length)
    shares = weights.split([int(flags.sum()) for flags in sampled])
    seen = sum(int((~flags).sum()) for flags in sampled)
    made = []
    for pack, one, place, flags, share in zip(packs, wanted, places, sampled, shares, strict=True):
        own, at = place[flags], one.offsets[flags]
        recorded = [sequences[index].recorded[position] for index, position in zip(own, at, strict=True)]
        made.append(
            Microbatch(
                pack,
                one,
                sampled=torch.from_numpy(flags).to(device),
                observed=torch.from_numpy(~flags / max(1, seen)).to(device),
                recorded=torch.tensor(recorded, dtype=torch.float32, device=device),
                advantages=torch.tensor([sequences[index].advantage for index in own], device=device).float(),
                sequences=torch.from_numpy(own).to(device),
                weights=share.to(device),
            )
        )
    return made
