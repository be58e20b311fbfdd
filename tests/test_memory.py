"""Memory that was freed goes back to the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
from pathlib import Path
from polar_proxy.memory import release_free_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

blocks = [bytes(2000) for _ in range(100_000)]
last = blocks[-1]  # it keeps the heap from shrinking by itself
del blocks
before = resident_mb()
release_free_memory()
print(before - resident_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs Linux with glibc")
def test_free_pages_are_returned() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert float(ran.stdout) > 150
