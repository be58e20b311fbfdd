"""Ports for programs that need to know their port before they start."""

from __future__ import annotations

import random
import socket

EPHEMERAL = 32768
"""The first port that the kernel assigns to outgoing connections and to sockets bound to port 0 (Linux)."""


def free_port() -> int:
    """Return a free port on loopback outside of the kernel's range, so that no other socket gets it by chance."""
    while True:
        port = random.SystemRandom().randrange(20_000, EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
