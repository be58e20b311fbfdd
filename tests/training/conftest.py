"""Fixtures of the training tests: a small policy with random weights, and one thread for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import make_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("policy"), vocab_size=300)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run PyTorch with one thread: computations repeat bit for bit, and a busy machine is not slowed down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
