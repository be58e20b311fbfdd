"""Limits that some Docker engines ignore."""

from __future__ import annotations

import pytest

from sandboxes.base import Sandbox


def require_limit(sandbox: Sandbox, limit: str) -> None:
    """Skip the test if the Docker engine ignores this limit."""
    if ignored := [line for line in sandbox.unenforced if line.startswith(f"{limit}: the engine ignores it")]:
        pytest.skip(ignored[0])
