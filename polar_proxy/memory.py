"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Return the free pages of the C library's heap to the operating system.

    glibc would keep them, and separately for each thread. For each of its threads, a server would then keep the largest
    amount that the thread ever needed (https://man7.org/linux/man-pages/man3/malloc_trim.3.html). Does nothing with
    other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
