"""vLLM's server on a CPU, for `scripts/vllm_cpu.sh`. Runs in vLLM's environment.

    python vllm_cpu_server.py MODEL EMPTY_FOLDER [flags of vLLM's server...]
    python vllm_cpu_server.py --socket SOCKET

Importing vLLM takes most of a start. So the second form imports it once and waits. If POLAR_VLLM_SOCKET names its
socket, the first form imports nothing: it sends its arguments, environment and output to the waiting process, which
forks the server, and the server ends when the process of the first form ends.

vLLM spawns its engine as another process on a CPU, which would import vLLM again. Here it is forked, too.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path

_SERVER = "vllm.entrypoints.openai.api_server"
_MOST_BYTES = 1 << 20


def untie(model: Path, untied: Path) -> Path:
    """Write a model whose output head is untied from the embedding into `untied`, and return that folder; `model`
    itself if its head is untied already.

    vLLM's CPU kernels keep a packed copy of the head, and a weight reload renews it only if the head is loaded under
    its own name.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    places, embedding = {}, None
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), f"body-{file.name}")
            if "model.embed_tokens.weight" in tensors.keys():  # noqa: SIM118
                embedding = tensors.get_tensor("model.embed_tokens.weight")
    if not config.get("tie_word_embeddings") or embedding is None:
        return model
    for file in model.iterdir():
        (untied / f"{'body-' if file.suffix == '.safetensors' else ''}{file.name}").symlink_to(file)
    save_file({"lm_head.weight": embedding}, untied / "head.safetensors", {"format": "pt"})
    places["lm_head.weight"] = "head.safetensors"
    for name, written in (
        ("config.json", {**config, "tie_word_embeddings": False}),
        ("model.safetensors.index.json", {"metadata": {}, "weight_map": places}),
    ):
        (untied / name).unlink(missing_ok=True)
        (untied / name).write_text(json.dumps(written))
    return untied


def serve(model: str, untied: str, *flags: str) -> None:
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv[1:] = ["--model", str(untie(Path(model).absolute(), Path(untied))), *flags]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


def fork_servers(path: str) -> None:
    """Import vLLM, and fork a server for each request at the socket. Requests wait for the import."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes for the requests are not waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        importlib.import_module("safetensors.torch")
        importlib.import_module(_SERVER)

        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(connection)
                os._exit(0)
            connection.close()


def answer(connection: socket.socket) -> None:
    """Run the requested server until it ends, and reply with its exit code; or until the requesting process ends."""
    request, outputs, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
    server = os.fork()
    if server == 0:
        connection.close()
        os.setsid()
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        asked = json.loads(request)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        tempfile.tempdir = None  # it is in the environment
        serve(*asked["arguments"])
        os._exit(0)
    ended = os.pidfd_open(server)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.killpg(server, signal.SIGKILL)
    _, status = os.waitpid(server, 0)
    if ended in ready:
        connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))


def request_server(path: str, arguments: list[str]) -> int:
    """Request a server from the process at the socket, wait until the server ends, and return its exit code."""
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [request], [1, 2])
        return (connection.recv(1) or b"\1")[0]


if __name__ == "__main__":
    waiting = Path(os.environ.get("POLAR_VLLM_SOCKET", ""))
    if sys.argv[1] == "--socket":
        fork_servers(sys.argv[2])
    elif waiting.is_socket():
        sys.exit(request_server(str(waiting), sys.argv[1:]))
    else:
        serve(*sys.argv[1:])
