"""Functions of the C library that Python's standard library lacks."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for the next step; without glibc, do nothing.

    By default malloc may return it to the system, and the next step then has a page fault for every
    4 KB of activations: training on a CPU took 4 % longer with the default model and 18 % with a
    ResNet-18, measured by the template's `python -m benchmarks loop_overhead`.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; its man page names the two options and the largest value
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
