"""A real PostgreSQL server and a real Ray cluster, both started for this folder's tests."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.rollouts.cluster.machines import Node, RayHead, Serving, environment
from tests.store.conftest import PostgresServer, postgres

__all__ = ["postgres"]


class Machines:
    """A Ray head. Tests add nodes, and those that are left are killed at the end."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.env = {
            **environment(self.home, folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(24),
        }
        (folder / "tmp").mkdir()
        self.head = RayHead(self.env, folder, port)
        self.nodes: list[Node] = []
        self.services: list[Serving] = []

    def start(self) -> None:
        self.head.until("Ray runtime started")

    def add(self, sandboxes: int, **environment: str) -> Node:
        """Add a node with this capacity and additional environment variables. Nodes start one at a time, because two at
        once would take each other's sockets."""
        node = Node({**self.env, **environment}, self.folder, f"node-{len(self.nodes)}", self.head.address, sandboxes)
        self.nodes.append(node)
        node.until("Ray runtime started")
        return node

    def serve(self, url: str) -> Serving:
        """Start `polar serve` on this cluster and database, and wait until it is ready."""
        served = Serving(self.env, self.folder, f"serve-{len(self.services)}", self.head.address, url)
        self.services.append(served)
        served.ready()
        return served

    def release(self) -> None:
        """Let waiting agents continue."""
        self.home.mkdir(exist_ok=True)
        (self.home / "go").touch()

    def end(self) -> None:
        for program in (*self.services, *self.nodes, self.head):
            program.end()


@pytest.fixture
def machines() -> Iterator[Machines]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install 'polar-proxy[ray]')")
    # Ray gives its sockets long names, and the path of a socket may have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="pr-"))
    made = Machines(folder, free_port())
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database(f"t{os.urandom(6).hex()}")
