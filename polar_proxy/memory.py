"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Return the free pages of the C library's heap to the operating system.

    Without this call, glibc keeps the pages of each thread: a server would hold, for every thread, the most memory that
    the thread ever needed (https://man7.org/linux/man-pages/man3/malloc_trim.3.html). Does nothing with other C
    libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
