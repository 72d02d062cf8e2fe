"""PyTorch's own DataLoader, or threads of the training process, as the backend."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import starmap
from typing import Any

import torch
from torch.utils.data import DataLoader

from conf.schema import Config
from loaders.ahead import begun_ahead
from loaders.execute import Executed, PlannedImages
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.overlap import Finished, in_thread, on_stream
from loaders.pixels import RawBatch
from loaders.sampler import PlanSampler
from loaders.turns import TurnDataset, TurnSampler
from loaders.workers import begin_to_start, init_worker, watch


class PyTorchLoader(Loader):
    """Batches through `torch.utils.data.DataLoader`, whose batch sampler walks the plan.

    `loader.num_workers` processes with `loader.num_threads` threads each prepare the batches; without
    worker processes, threads of the training process do.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        workers = cfg.loader.num_workers
        num_threads = cfg.loader.num_threads or max(1, cpus_per_rank() // max(1, workers))
        pin_memory = device.type == "cuda"
        self.dataset = PlannedImages(
            self.index,
            self.read_sizes(),
            num_threads,
            pin_memory and not workers,
            cfg.data.reduced_decoding,
        )
        self.data_loader: DataLoader[Executed] | None = None
        if workers:
            dataset, batches = (
                (TurnDataset(self.dataset), TurnSampler(sampler, workers))
                if self.index.is_remote
                else (self.dataset, sampler)
            )
            self.data_loader = DataLoader(
                dataset,
                batch_sampler=batches,  # type: ignore[arg-type]  # of arrays, not lists
                collate_fn=_as_it_is,
                num_workers=workers,
                prefetch_factor=cfg.loader.prefetch_factor,
                persistent_workers=True,
                pin_memory=pin_memory,
                worker_init_fn=init_worker,
                multiprocessing_context=begin_to_start(),
                # Of its own: what it draws would change the masks that dropout draws after a resume.
                generator=torch.Generator(),
            )

    def finished_batches(self) -> Iterator[Finished]:
        if self.device.type == "cuda":
            return on_stream(self.raw_batches(), self.pixels.finish, self.device)
        if self.data_loader is not None:
            # Enlarging is work enough for all cores; they have other work while the rest is done.
            enlarges = self.read_size != self.output_size
            num_threads = torch.get_num_threads() if enlarges else 1
            return in_thread(self.raw_batches(), self.pixels.finish, num_threads)
        if self.index.images is not None:
            return starmap(self.pixels.finish, self.raw_batches())
        return self._finished_by_threads()

    def raw_batches(self) -> Iterator[RawBatch]:
        """The rows of each batch and their images, still to be finished."""
        executed: Iterator[Executed]
        if self.data_loader is not None:
            executed = _by_processes(self.data_loader)
        elif self.index.images is not None:  # faster at hand than through a thread
            executed = map(self.dataset.__getitems__, self.sampler)
        else:
            executed = self._by_threads(_as_it_is)
        for batch in executed:
            yield from self._without_bad(batch)
            if self.failed is not None:
                break

    def _finished_by_threads(self) -> Iterator[Finished]:
        """By the threads that fill the batches: a further one would take the CPU from them."""

        def finish(executed: Executed) -> Executed | Finished:
            if executed.bad or executed.failed:
                return executed
            return self.pixels.finish(executed.rows, executed.images)

        for answer in self._by_threads(finish):
            if isinstance(answer, Executed):
                yield from starmap(self.pixels.finish, self._without_bad(answer))
                if self.failed is not None:
                    break
            else:
                yield answer

    def _by_threads(self, then: Callable[[Executed], Any]) -> Iterator[Any]:
        """What `then` makes of each batch, while `loader.prefetch_factor` further ones are begun."""
        started = deque[Future[Any]]()
        try:
            for rows, begun in begun_ahead(self.sampler, self.index, self.dataset.sizes):
                started.append(self.dataset.start(rows, then, begun))
                if len(started) > self.cfg.loader.prefetch_factor:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            for future in started:
                future.cancel()

    def _without_bad(self, executed: Executed) -> Iterator[RawBatch]:
        """The batch without its bad samples, if any others are left and it has not failed."""
        while executed.bad and not executed.failed:
            self.sampler.set_aside(executed.bad)
            executed = self.dataset.__getitems__(self.sampler.without_bad(executed.rows))
        if executed.failed:
            self.failed = executed.failed[0]
        elif len(executed.rows):
            yield executed.rows, executed.images


def _as_it_is(batch: Any) -> Any:
    return batch


def _by_processes(data_loader: DataLoader[Executed]) -> Iterator[Executed]:
    """The workers' batches; a worker that dies says which setting to change."""
    are_new = data_loader._iterator is None
    batches: Any = iter(data_loader)
    if are_new:
        watch(batches._workers, batches._workers_done_event)
    try:
        yield from batches
    except ConnectionError:
        time.sleep(1)  # a worker was killed while it sent: here comes the signal that says so
        raise
