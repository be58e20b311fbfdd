"""What tests of training share: a small policy with random weights, and one thread for PyTorch."""

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
    """Two runs of one computation are then the same to the bit, and a busy machine is not made slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
