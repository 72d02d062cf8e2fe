"""What the number of samples costs a rank: time to the first batch and to go on in the middle, and memory.

The index is sparse: every sample is the same image, held once. What grows with the number of samples is
then the plan's doing. `samples=1e9` measures that number alone. The figures of each are also printed as a line of JSON.
"""

import json
import multiprocessing
import statistics
import time

import numpy as np
import psutil
import torch

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from loaders.index import Index, Labels
from loaders.pytorch import PyTorchLoader
from loaders.sampler import PlanSampler

FIRST_BATCH, RESUME, GROWTH = "first batch", "first batch at 70 %", "memory growth"
BATCH_SIZE = 256


def main(run: Run) -> None:
    for count in run.sizes.samples:
        samples: dict[tuple[str, str], list[float]] = {}
        for _ in range(run.sizes.repeats):
            # A process of its own, whose memory nothing else has grown.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                for what, value in pool.apply(measure, (count,)).items():
                    samples.setdefault(what, []).append(value)
        run.record("scale", "a sparse index", Subject(f"{count:,} samples"), samples)
        names = {FIRST_BATCH: "first_batch_s", GROWTH: "rss_growth_mb", RESUME: "resume_s"}
        medians = {names[what]: statistics.median(samples[what, unit]) for what, unit in samples}
        print(json.dumps({"samples": count} | medians), flush=True)


def measure(count: int) -> dict[tuple[str, str], float]:
    """By quantity and unit, what so many samples cost this process."""
    cfg = make_config("loader.num_threads=1")
    before = psutil.Process().memory_info().rss
    found = {}
    for what, position in ((FIRST_BATCH, 0), (RESUME, count * 7 // 10 // BATCH_SIZE * BATCH_SIZE)):
        start = time.perf_counter()
        sampler = PlanSampler(sparse_index(count), cfg.data, 0, BATCH_SIZE, 0, 1, train=True)
        loader = PyTorchLoader(sampler, cfg, torch.device("cpu"))
        loader.load_state_dict({"epoch": 0, "position": position})
        inputs, _ = next(iter(loader))
        assert len(inputs) == BATCH_SIZE
        found[what, "s"] = time.perf_counter() - start
    found[GROWTH, "MB"] = (psutil.Process().memory_info().rss - before) / 1e6
    return found


def sparse_index(count: int) -> Index:
    """So many images of 28x28 pixels, all the same."""
    return Index(
        name="sparse/train",
        sizes=np.broadcast_to(np.array([28, 28], np.int32), (count, 2)),
        channels=1,
        target=Labels(np.broadcast_to(np.int64(0), count), ("all",)),
        images=np.broadcast_to(np.zeros((28, 28, 1), np.uint8), (count, 28, 28, 1)),
    )
