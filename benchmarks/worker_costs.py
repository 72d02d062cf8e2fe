"""What worker processes cost: their start, their memory, and the time of the training process.

An operation of PyTorch gives up Python's interpreter lock and takes it back, as the launch of a
kernel does: beside threads that load, it waits for them. Its time beside a loader at full speed is
compared with that beside as many processes that compute something else.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from threading import Event, Thread

import psutil
import torch

from benchmarks.records import Subject
from benchmarks.run import Run
from loaders import Loader, build_loaders

NUM_ROUNDS, SECONDS = 3, 1.0
START, MEMORY, OPERATION = "start", "memory of a worker", "time of an operation"


def main(run: Run) -> None:
    """Measure the loader of photos with 1 and 2 worker processes of one thread."""
    for case in run.chosen("caltech256"):
        for num_workers in (1, 2):
            subject = Subject("loader=pytorch", num_workers, 1)
            if run.is_done("worker_costs", case.name, [subject], START):
                continue
            options = ["loader=pytorch", f"loader.num_workers={num_workers}"]
            cfg = run.config(case.name, *options, "loader.num_threads=1")
            start = time.perf_counter()
            loader, _ = build_loaders(cfg, run.device)
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
