"""The named algorithms that have one signature each, for a configuration to choose from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polar_proxy.training import corrections, losses
from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.training.tokens import LossStats

__all__ = ["ADVANTAGES", "LOSSES"]

LOSSES: dict[str, Callable[..., tuple[Tensor, LossStats]]] = {
    "ppo_clip": losses.ppo_clip,
    "dapo": losses.dapo,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "minpro": losses.minpro,
    "bapo": losses.bapo,
    "decoupled": corrections.decoupled,
    "tis": corrections.tis,
    "icepop": corrections.icepop,
}
"""`Tokens` -> loss and statistics; further settings by keyword."""
