"""Muon in fp32 (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

PyTorch's own does the orthogonalisation in bfloat16, which a CPU without bfloat16 units computes very slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return approximately the nearest semi-orthogonal matrix: five Newton-Schulz steps with Muon's quintic."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed, see pyproject
    """Momentum (Nesterov), orthogonalised, scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all matrices. Closures are not supported."""
        del closure
        with torch.no_grad():
            for group in self.param_groups:
                for matrix in group["params"]:
                    if matrix.grad is not None:
                        self._update(matrix, group)

    def _update(self, matrix: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        average = state["momentum"].lerp_(matrix.grad, 1.0 - group["momentum"])
        update = orthogonalise(matrix.grad.lerp(average, group["momentum"]))
        scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        matrix.mul_(1.0 - group["lr"] * group["decay"])
        matrix.add_(update, alpha=-group["lr"] * scale)
