"""Start-up time and memory per rank by number of samples: to the first batch, to resume mid-epoch.

A sparse index, whose samples are all the same image in memory, shows the cost of planning. An index
on disk lists up to ten million file names that refer to a thousand JPEGs. `samples=1e9` selects a
single number of samples. The medians of the sparse index are also printed as a line of JSON.
"""

import json
import multiprocessing
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from loaders.backends import backend
from loaders.index import (
    SPLITS,
    Index,
    MemoryIndex,
    Paths,
    Stored,
    file_index,
    open_splits,
    read_headers,
    write_index,
)
from loaders.plan import PlanSampler
from loaders.targets import Labels

FIRST_BATCH, RESUME, GROWTH = "first batch", "first batch at 70 %", "memory growth"
BATCH_SIZE = 256
MAX_FILES = 10**7


def main(run: Run) -> None:
    for count in run.sizes.samples:
        if count <= MAX_FILES:
            with TemporaryDirectory() as folder:
                options = write_files(count, Path(folder))
                run.record("scale", "an index of files", *measure_repeatedly(run, count, options))
        subject, samples = measure_repeatedly(run, count, None)
        run.record("scale", "a sparse index", subject, samples)
        names = {FIRST_BATCH: "first_batch_s", GROWTH: "rss_growth_mb", RESUME: "resume_s"}
        medians = {names[what]: statistics.median(samples[what, unit]) for what, unit in samples}
        print(json.dumps({"samples": count} | medians), flush=True)


def measure_repeatedly(
    run: Run, count: int, options: list[str] | None
) -> tuple[Subject, dict[tuple[str, str], list[float]]]:
    """Samples by (quantity, unit), each measured in a new process with the memory of no other."""
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(run.sizes.repeats):
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            for what, value in pool.apply(measure, (count, options)).items():
                samples.setdefault(what, []).append(value)
    return Subject(f"{count:,} samples"), samples


def measure(count: int, options: list[str] | None) -> dict[tuple[str, str], float]:
    """Measure once: the index that `options` open or, if None, a sparse index."""
    cfg = make_config("loader.num_threads=1", f"global_batch_size={BATCH_SIZE}", *(options or ()))
    before, found = private_bytes(), {}
    for what, position in ((FIRST_BATCH, 0), (RESUME, count * 7 // 10 // BATCH_SIZE * BATCH_SIZE)):
        start = time.perf_counter()
        index = sparse_index(count) if options is None else open_splits(cfg.data)[0]
        sampler = PlanSampler(index, cfg, 0, 1, train=True)
        loader = backend("pytorch")(sampler, cfg, torch.device("cpu"))
        loader.load_state_dict({"epoch": 0, "position": position})
        inputs, _ = next(iter(loader))
        assert len(inputs) == BATCH_SIZE
        found[what, "s"] = time.perf_counter() - start
    found[GROWTH, "MB"] = (private_bytes() - before) / 1e6
    return found


def private_bytes() -> int:
    """Memory of this process without shared file pages."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def sparse_index(count: int) -> Index:
    """Index of `count` identical images of 28x28 pixels."""
    size = np.array([[28, 28]], np.int32)
    return MemoryIndex(
        name="sparse/train",
        sizes=np.broadcast_to(size, (count, 2)),
        channels=1,
        target=Labels(np.broadcast_to(np.int64(0), count), ("all",)),
        pixels=(np.zeros(28 * 28, np.uint8),),
        offsets=np.broadcast_to(np.int64(0), count),
        stored=Stored(partial(sparse_index, count), "", size),
    )


def write_files(count: int, folder: Path) -> list[str]:
    """Write up to 1,000 files and the index of `count` files; return the options that open it."""
    root, num_files = folder / "images", min(count, 1000)
    root.mkdir()
    for number in range(num_files):
        Image.new("RGB", (64, 64), (number % 256, 0, 0)).save(root / f"{number:03}.jpg")
    options = [
        *("data=imagefolder", f"data.root={root}", f"data.index={folder / 'index'}"),
        *("data.check_files=false", "data.resize=null", "data.crop=[56,56]"),
        *("data.random_resized_crop=null", "data.hflip=0", "model=small_cnn"),
    ]
    data = make_config(*options, f"data.cache_dir={folder}").data
    files = [str(root / f"{number:03}.jpg") for number in range(num_files)]
    side = read_headers(files, data, "rgb")
    target = Labels(np.zeros(num_files, int), ("all",))
    index = file_index("files", str(root), (side,), target)
    [paths], times = index.files, -(-count // num_files)
    many = replace(
        index,
        sizes=np.tile(index.sizes, (times, 1))[:count],
        target=Labels(np.zeros(count, np.int64), ("all",)),
        files=(Paths(paths.folder, np.tile(paths.names, times)[:count]),),
        headers=(np.tile(side.headers, times)[:count],),
    )
    write_index(dict(zip(SPLITS, (many, index), strict=True)), data, folder / "index")
    return options
