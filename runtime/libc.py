"""A setting of the C library, which Python's standard library lacks."""

import ctypes
import sys


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for the next step; without glibc, do nothing.

    By default malloc may return it to the system, and the next step then has a page fault for every
    4 KB of activations: training on a CPU took 4 % longer with the default model and 18 % with a
    ResNet-18, measured by the template's `python -m benchmarks loop_overhead`.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(-1, -1)  # M_TRIM_THRESHOLD
        set_option(-3, 32 << 20)  # M_MMAP_THRESHOLD, the largest value
