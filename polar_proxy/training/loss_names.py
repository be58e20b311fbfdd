"""Names and constants of the losses. They are apart from `losses.py` because settings and the web view need them
without PyTorch."""

from __future__ import annotations

from typing import Literal

LossAggregation = Literal["token", "sequence", "rollout", "constant"]
LOSS_NAMES = ("ppo_clip", "dapo", "gspo", "cispo", "minpro", "bapo", "decoupled", "tis", "icepop")
"""The names of the policy losses, which are the keys of `losses.LOSSES`."""
PROXIMAL_LOSSES = frozenset({"decoupled", "tis", "icepop"})
"""The losses that use a proximal policy (setting `proximal`)."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20, so that exp never overflows. Clamped values pass no gradient."""
