"""The named algorithms that have one signature each, for a configuration to choose from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polar_proxy.training import advantages, corrections, losses
from polar_proxy.training.tokens import LossStats

ADVANTAGES: dict[str, Callable[[advantages.Rewards], advantages.Floats]] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "mc_grpo": advantages.mc_grpo,
}
"""Rewards of one group [n] -> advantages [n]. `gdpo` (several rewards) and `gigpo` (steps) take more than that."""

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
