"""What ends a training run."""

from __future__ import annotations

from polar_proxy.errors import PolarError


class TrainingError(PolarError):
    """Training cannot go on: the text says what was found, what it means and what to do."""
