"""Functions of the C library that Python's standard library lacks."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # part: ranks
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # part: cpu_memory


def keep_freed_memory() -> None:  # part: cpu_memory
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


def end_with_parent() -> None:  # part: ranks
    """Make Linux send SIGTERM to this process when its parent dies, such as torchrun, without which
    it would train on; elsewhere, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
