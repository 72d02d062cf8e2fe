"""Transform the next batch on the CPU while the current one is used."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from loaders.epoch.prefetch import Batch, RawBatch, Transform
from loaders.limits import torch_threads


def transformed(
    batches: Iterable[RawBatch], transform: Transform, num_threads: int
) -> Iterator[Batch]:
    """Transform batches on the CPU, in one thread that uses `num_threads` threads of torch."""
    pool = torch_threads(1, "transform", num_threads)
    try:
        ready: Future[Batch] | None = None
        for batch in batches:
            following = pool.submit(transform, *batch)
            if ready is not None:
                yield ready.result()
            ready = following
        if ready is not None:
            yield ready.result()
    finally:
        # Without waiting: the garbage collector may end this generator in the pool's own thread.
        pool.shutdown(wait=False, cancel_futures=True)
