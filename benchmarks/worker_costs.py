"""What worker processes cost and bring: start, memory, time of the training process, and speed.

An operation of PyTorch gives up Python's interpreter lock and takes it back, as the launch of a
kernel does: beside threads that load, it waits for them. Its time beside a loader at full speed is
compared with that beside as many processes that compute something else.

The speed is that of batches as a GPU gets them: uint8 images, which it transforms itself.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from threading import Event, Thread
from typing import Any

import psutil
import torch

from benchmarks.interleave import CountItems
from benchmarks.records import Subject
from benchmarks.run import Run
from loaders import Loader
from loaders.backends import build_loaders

NUM_ROUNDS, SECONDS = 3, 1.0
START, MEMORY, OPERATION = "start", "memory of a worker", "time of an operation"


def main(run: Run, num_images: int = 4000) -> None:
    """Measure the loader of photos with 1 and 2 worker processes of one thread.

    Args:
        run: its case `caltech256` is used.
        num_images: enough that the workers are seldom idle at the end of an epoch.
    """
    data = {**run.sizes.data, "caltech256": num_images}
    # Long slices: after each one, the processes wait for one another.
    sizes = replace(run.sizes, data=data, window_s=SECONDS, slice_s=SECONDS)
    run = replace(run, sizes=sizes, prepared={})
    for case in run.chosen("caltech256"):
        subjects = [Subject("loader=pytorch", num_workers, 1) for num_workers in (1, 2)]
        speeds = {
            subject: partial(take_images, run, case.name, subject.num_workers)
            for subject in subjects
        }
        run.compare("worker_costs", case.name, speeds, unit="images/s")
        for subject in subjects:
            if run.is_done("worker_costs", case.name, [subject], START):
                continue
            num_workers = subject.num_workers
            start = time.perf_counter()
            loader = new_loader(run, case.name, num_workers)
            next(iter(loader))
            seconds = time.perf_counter() - start
            process = psutil.Process()
            # The server that forks them is a child of this process.
            workers = {*process.children(recursive=True)} - {*process.children()}
            ratios = [
                operation_us(loading(loader)) / operation_us(computing(num_workers))
                for _ in range(NUM_ROUNDS)
            ]
            memories = [worker.memory_full_info().uss / 1e6 for worker in workers]
            values = {(START, "s"): [seconds], (MEMORY, "MB"): memories, (OPERATION, "x"): ratios}
            run.record("worker_costs", case.name, subject, values)


def new_loader(run: Run, case: str, num_workers: int) -> Any:
    options = ["loader=pytorch", f"loader.num_workers={num_workers}", "loader.num_threads=1"]
    return build_loaders(run.config(case, *options), run.device)[0]


def take_images(run: Run, case: str, num_workers: int, count_items: CountItems) -> None:
    """Take the images of all batches from the worker processes, without a transform."""
    loader = new_loader(run, case, num_workers)
    while True:
        loader.set_epoch(loader.epoch + 1)
        for batch in loader.shared:
            count_items(len(batch.rows))


def operation_us(beside: AbstractContextManager[None]) -> float:
    """Mean time of a small operation in microseconds, while something else runs."""
    x, times = torch.zeros(4), []
    with beside:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(200):
                x.add_(1)
            times.append((time.perf_counter() - start) / 200)
    return 1e6 * statistics.mean(times)


@contextmanager
def loading(loader: Loader) -> Iterator[None]:
    """A thread takes all batches of a loader, epoch after epoch."""
    stopped = Event()

    def take() -> None:
        while not stopped.is_set():
            loader.set_epoch(loader.epoch + 1)
            for _ in loader:
                if stopped.is_set():
                    break

    thread = Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def computing(count: int) -> Iterator[None]:
    """So many processes compute something."""
    processes = [get_context("spawn").Process(target=count_up, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    time.sleep(1.0)  # until they have started
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def count_up() -> None:
    number = 0
    while True:
        number += 1
