"""Threads beside the training that compute with torch."""

from concurrent.futures import ThreadPoolExecutor

import torch


def torch_threads(number: int, name: str, torch_num_threads: int) -> ThreadPoolExecutor:
    """So many threads, each of which splits torch's operations among `torch_num_threads` threads.

    The thread that calls this keeps its own number: torch gives a thread the number that any other has set
    last, at the first operation that is large enough to be split.
    """
    torch.get_num_threads()  # which settles that of the calling thread
    return ThreadPoolExecutor(number, name, torch.set_num_threads, (torch_num_threads,))
