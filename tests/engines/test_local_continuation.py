"""The continuation contract against the local engine: a model with random weights, and polar-tiny where it is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import polar_proxy
from polar_proxy.engines.local.engine import LocalEngine
from tests.engines.continuation_contract import ContinuationContract

POLAR_TINY = Path(polar_proxy.__file__).parent / "assets" / "polar_tiny"


@pytest.fixture(params=["random", "polar-tiny"])
def model_dir(request: pytest.FixtureRequest, random_model_dir: Path) -> Path:
    if request.param == "random":
        return random_model_dir
    if not (POLAR_TINY / "model.safetensors").is_file():
        pytest.skip("polar-tiny's weights are not there: they come with the package")
    return POLAR_TINY


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(model_dir, name="local", max_batch=4) as local:
        yield local


class TestContinuation(ContinuationContract):
    pass
