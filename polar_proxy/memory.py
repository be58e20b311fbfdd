"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Return the free pages of the C library's heap to the operating system.

    glibc keeps them otherwise, separately for each thread, so that a server would keep the largest amounts that its
    threads ever needed (https://man7.org/linux/man-pages/man3/malloc_trim.3.html). Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
