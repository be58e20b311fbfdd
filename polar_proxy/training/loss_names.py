"""The names of losses and aggregations. The settings know them without PyTorch, which a server must not load."""

from __future__ import annotations

from typing import Literal

LossAggregation = Literal["token", "sequence", "rollout", "constant"]
LOSS_NAMES = ("ppo_clip", "dapo", "gspo", "cispo", "minpro", "bapo", "decoupled", "tis", "icepop")
"""The names of the policy losses, which are the keys of `losses.LOSSES`."""
PROXIMAL_LOSSES = frozenset({"decoupled", "tis", "icepop"})
"""The losses that use a proximal policy (setting `proximal`)."""
