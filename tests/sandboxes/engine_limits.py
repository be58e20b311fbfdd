"""Limits that some Docker engines do not enforce."""

from __future__ import annotations

import pytest

from sandboxes.base import Sandbox


def require_limit(sandbox: Sandbox, limit: str) -> None:
    """Skip the test if the Docker engine does not enforce this limit."""
    if ignored := [line for line in sandbox.unenforced if line.startswith(f"{limit}: the engine")]:
        pytest.skip(ignored[0])
