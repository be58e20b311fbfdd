"""What one update puts through the model: packs of sequences, which of their tokens are trained, what each weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar_proxy.training.batch import TrainingSequence
from polar_proxy.training.normalise import How, token_weights
from polar_proxy.training.packing import Pack
from polar_proxy.training.tree import Targets, targets


@dataclass(slots=True)
class Pass:
    """One forward pass, of m targets. Tensors are [m], on the device."""

    pack: Pack
    wanted: Targets
    recorded: Tensor
    """float32, nats, as recorded at sampling."""
    advantages: Tensor
    sequences: Tensor
    """int64: of each target the number of its sequence within the update."""
    weights: Tensor
    proximal: Tensor | None = None
    """The trainer's own log-probabilities before the step, once they are known."""
    reference: Tensor | None = None
    """The reference's, where there is one."""

    def mismatch(self) -> tuple[float, float]:
        """Sum and largest of |the trainer's own before the step - recorded|, nats."""
        assert self.proximal is not None
        gap = (self.proximal - self.recorded).abs()
        return float(gap.sum()), float(gap.max())


def make_passes(
    packs: Sequence[Pack],
    sequences: Sequence[TrainingSequence],
    *,
    how: How,
    length: int | None,
    device: torch.device,
) -> list[Pass]:
    """A pass for each pack of `sequences`. What a token weighs is decided over all of them."""
    # Each sampled token stands in one sequence only (`make_batch` sees to it): every target weighs 1 before
    # normalisation, on whatever node it is.
    wanted = [targets(pack.tree, [sequences[index].trained for index in pack.members]) for pack in packs]
    places = [np.asarray(pack.members)[one.sequences] for pack, one in zip(packs, wanted, strict=True)]
    owners = torch.from_numpy(np.concatenate(places))
    rollouts = torch.tensor([sequence.rollout for sequence in sequences])[owners]
    weights = token_weights(torch.ones(len(owners)), owners, rollouts, how=how, length=length)
    shares = weights.split([len(one) for one in wanted])
    made = []
    for pack, one, place, share in zip(packs, wanted, places, shares, strict=True):
        recorded = [sequences[index].recorded[at] for index, at in zip(place, one.offsets, strict=True)]
        made.append(
            Pass(
                pack,
                one,
                torch.tensor(recorded, dtype=torch.float32, device=device),
                torch.tensor([sequences[index].advantage for index in place], device=device).float(),
                torch.from_numpy(place).to(device),
                share.to(device),
            )
        )
    return made
