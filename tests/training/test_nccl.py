"""Weights into vLLM by NCCL, which needs two GPUs. Here vLLM's own code of both sides runs on the CPU over another
transport (tests/fakes/nccl_on_cpu.py), with our calls and their results."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.training.config import GrpoConfig, make_config
from polar_proxy.training.weight_sync import VllmControl, VllmNcclSync, make_vllm_sync
from tests.engines.test_vllm_real import serve
from tests.engines.vllm_environment import vllm_python

REPOSITORY = Path(__file__).parents[2]
EXACT = 2e-4
"""Largest difference in nats between two float32 programs with equal weights, on unlikely text."""


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM look importable."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_missing_vllm_names_the_package_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    config = GrpoConfig(weight_transfer="nccl", device="cuda")
    with pytest.raises(UsageError, match=r"pip install 'polar-proxy\[local\]' vllm.*at disk"):
        make_vllm_sync(config, VllmControl("http://engine"), tmp_path)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "NCCL sends from a GPU: set device"),
        ({"device": "cuda", "lora": {"rank": 2, "adapter_name": "polar"}}, "vLLM reloads the adapter from disk"),
    ],
)
def test_rejects_unsupported_settings(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make_config({"weight_transfer": "nccl", **more})


def joined_sync(sender: object) -> tuple[VllmNcclSync, list[str]]:
    """Return a sync that has joined its group with this sender, and the paths that it requests of the server."""
    requested: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        requested.append(request.url.path)
        return httpx.Response(200, json={})

    sync = VllmNcclSync(VllmControl("http://engine/", transport=httpx.MockTransport(server)), device="cpu")
    sync._sender = sender
    return sync, requested


@pytest.mark.usefixtures("with_vllm")
async def test_refused_call_ends_a_sync_that_hangs_in_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait forever for workers that never join."""
    never = threading.Event()

    class Sender:
        client: Any

        def send_weights(self) -> None:
            with pytest.raises(TrainingError):
                self.client.start_weight_update()
            never.wait()

    monkeypatch.setattr(httpx, "post", lambda url, **more: httpx.Response(500, text="no device"))
    sync, requested = joined_sync(Sender())
    with pytest.raises(TrainingError, match="500 to POST /start_weight_update: no device"):
        await asyncio.wait_for(sync.push({"w": torch.ones(2)}, "1"), 10)
    never.set()
    assert requested == ["/pause", "/resume"]


@pytest.mark.usefixtures("with_vllm")
async def test_error_of_the_sender_is_raised_and_vllm_resumed() -> None:
    class Sender:
        def send_weights(self) -> None:
            raise RuntimeError("NCCL error: unhandled cuda error")

    sync, requested = joined_sync(Sender())
    with pytest.raises(TrainingError, match="by NCCL: RuntimeError: NCCL error: unhandled cuda error"):
        await sync.push({"w": torch.ones(2)}, "1")
    assert requested == ["/pause", "/resume"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return environment variables with which vLLM loads the other transport."""
    folder = tmp_path_factory.mktemp("plugins")
    dist_info = folder / "nccl_on_cpu-1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl_on_cpu\nVersion: 1\n")
    (dist_info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnccl_on_cpu = tests.fakes.nccl_on_cpu:install\n"
    )
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


@pytest.fixture(scope="module")
def url(plugin: dict[str, str]) -> Iterator[str]:
    yield from serve(POLAR_TINY, "--weight-transfer-config", '{"backend": "nccl"}', env=plugin)


def send(url: str, how: str = "sound") -> list[dict[str, Any]]:
    """Run nccl_program.py with vLLM's Python; Polar's dependencies come from this environment, after vLLM's own."""
    program = (
        "import sys; sys.path.append(sys.argv.pop(1)); from tests.training.nccl_program import run; run(*sys.argv[1:])"
    )
    command = [vllm_python(), "-c", program, sysconfig.get_path("purelib"), url, how]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_vllm_loads_every_tensor_and_rejects_other_shapes(url: str) -> None:
    """A second trainer joins the same server, as after a restart."""
    first, *later = send(url)
    assert first["mean"] < EXACT
    assert [line["engine"] for line in (first, *later)] == ["0", "1", "2"]
    for line in later:
        # Far less than the step moved it: a tensor that was not loaded would show.
        assert line["mean"] < min(EXACT, line["moved"] / 20)
    again, rejected = send(url, "wrong_shape")
    assert again["mean"] < EXACT
    assert "to POST /update_weights" in rejected["error"]
