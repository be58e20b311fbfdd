"""Ports for programs that must be told theirs before they start."""

from __future__ import annotations

import random
import socket

EPHEMERAL = 32768
"""From here on the kernel gives ports to whoever asks for any, and to outgoing connections (Linux)."""


def free_port() -> int:
    """One of the loopback that is free, and that nobody is given who asks for any port, so that it stays free."""
    while True:
        port = random.SystemRandom().randrange(20_000, EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
