"""The local engine: the contract, and what only it promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import polar_proxy
from polar_proxy.engines.local import LocalEngine
from tests.engines.contract import EngineContract

POLAR_TINY = Path(polar_proxy.__file__).parent / "models" / "polar_tiny"


@pytest.fixture(params=["random", "polar-tiny"], scope="module")
def model_dir(request: pytest.FixtureRequest, random_model_dir: Path) -> Path:
    if request.param == "random":
        return random_model_dir
    if not (POLAR_TINY / "config.json").is_file():
        pytest.skip("polar-tiny's weights are not in the package yet")
    return POLAR_TINY


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(model_dir, threads=1) as local:
        yield local


class TestContract(EngineContract):
    pass
