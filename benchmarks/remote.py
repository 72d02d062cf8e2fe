"""Speed and memory of reading shards from a server, compared with local data and other libraries.

A server runs on loopback with latencies of 0, 20 and 100 ms and a CPU core of its own; readers use
the others. They run alternately; each sample comes from a new process without copies of the data.
"""

import importlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import records
from benchmarks.baselines import Job, Recipe
from benchmarks.fresh import run_fresh
from benchmarks.records import Subject
from benchmarks.run import SPEED, Run, Sizes, now, progress
from benchmarks.scale import FIRST_BATCH
from benchmarks.server import serve
from benchmarks.template import endless, make_config
from loaders import build_loaders
from loaders.index import open_splits
from loaders.shards import pack_shards
from runtime.setup import resolve_device

PEAK = "peak memory"
CASE, TITLE = "caltech256", "JPEGs, resize 256, random crop 224"
LATENCIES_MS = (0, 20, 100)
"""Latencies of the servers."""
SHARD_MB = 64
OVER_NETWORK = "benchmarks.baselines.over_network"
OTHERS = {
    "WebDataset": ("webdataset", "the same shards, by curl; shuffle buffer of 1,000"),
    "LitData": ("litdata", "fetches whole chunks of 64 MB, two ahead; copies on disk"),
    "mosaicml-streaming": ("mosaicml", "fetches whole shards of 64 MB; copies on disk"),
}
"""By name: function in OVER_NETWORK and note. All decode with torchvision in worker processes,
which return uint8 images, and convert whole batches to float32.
"""
MIN_SAMPLES = 8000
"""Smaller data sets are linked under several names: an epoch that ends would read copies again."""
WARMUP_S, WINDOW_S = 1.0, 3.0
"""Shortest warm-up and measurement in seconds."""
WINDOW = ("data.shuffle=window", "data.shuffle_window=2")
"""Small windows, which makes room for fetching one while the previous one is read."""
CREDENTIALS = {
    **{"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark"},
    **{"AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"},
}

Figures = dict[tuple[str, str], float]
"""Results by quantity and unit."""


@dataclass(frozen=True)
class Reader:
    """A loader and what it reads; measured in a process of its own."""

    overrides: tuple[str, ...]
    """Overrides of the configuration."""

    bucket: Path
    address: str = ""
    """Address of the server."""

    other: str = ""
    """Key of OTHERS; empty: the template's loader."""

    def batches(self, parallel: int, folder: Path) -> Iterator[Any]:
        """Endless training batches from `parallel` threads or workers, with copies in `folder`."""
        cfg = make_config(*self.overrides, f"data.cache_dir={folder}")
        if not self.other:
            cfg.loader.num_threads = parallel
            return endless(build_loaders(cfg, resolve_device("cpu"))[0])
        job = Job(Recipe.of(cfg.data), [], [], cfg.global_batch_size, parallel, folder=folder)
        load = getattr(importlib.import_module(OVER_NETWORK), OTHERS[self.other][0])
        return load(self.bucket, self.address, job)


def main(run: Run) -> None:
    cores = records.cores()
    server_cores, reader_cores = (cores[:1], cores[1:]) if len(cores) > 1 else (cores, cores)
    overrides, bucket = prepare(run)
    readers = {
        "loader=pytorch, files on disk": Reader(overrides, bucket),
        "loader=pytorch, shards on disk": Reader(
            (*overrides, f"data.root={bucket}/shards", *WINDOW), bucket
        ),
    }
    with ExitStack() as stack:
        for latency_ms in LATENCIES_MS:
            address = stack.enter_context(
                serve(bucket.parent, latency_ms / 1000, set(server_cores))
            )
            root = f"data.root=s3://{bucket.name}/shards"
            ours = Reader((*overrides, root, *WINDOW), bucket, address)
            readers[f"loader=pytorch, shards, {latency_ms} ms"] = ours
            for other in OTHERS:
                readers[f"{other}, {latency_ms} ms"] = Reader(overrides, bucket, address, other)
        measure(run, readers, reader_cores)


def prepare(run: Run) -> tuple[tuple[str, ...], Path]:
    """Overrides that read the local files, and the bucket folder of the server.

    Links to the files and all shards are created if missing.
    """
    cfg = run.config(CASE)
    folder = run.data_dir / f"remote-{Path(cfg.data.root).name}"
    overrides = (*run.case_overrides(CASE), f"data.root={folder / 'files'}")
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        files = sorted(path for path in Path(cfg.data.root).rglob("*") if path.is_file())
        for path in files:
            for copy in range(-(-MIN_SAMPLES // len(files))):
                below = path.relative_to(cfg.data.root).with_stem(f"{path.stem}-{copy}")
                link = unfinished / "files" / below
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())
        unfinished.rename(folder)
    bucket = folder / "server" / "bucket"
    data = make_config(*overrides).data
    if not (bucket / "shards" / "shards.json").is_file():
        pack_shards(data, str(bucket / "shards"), SHARD_MB)
    importlib.import_module(OVER_NETWORK).prepare(list(open_splits(data)[0].files[0]), bucket)
    return overrides, bucket


def measure(run: Run, readers: dict[str, Reader], cores: list[int]) -> None:
    """Run the readers alternately and write rows for each."""
    subjects = {
        name: Subject(name, *((len(cores), 0) if reader.other else (0, len(cores))))
        for name, reader in readers.items()
    }
    if run.is_done("remote", TITLE, subjects.values()):
        return
    found: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in readers}
    notes = {name: OTHERS[reader.other][1] for name, reader in readers.items() if reader.other}
    failed: set[str] = set()
    with progress(run.sizes.repeats, "remote") as bar:
        for _ in range(run.sizes.repeats):
            for name in [name for name in readers if name not in failed]:
                try:
                    with TemporaryDirectory(prefix="copies-", ignore_cleanup_errors=True) as folder:
                        copies = Path(folder)
                        program = partial(
                            measure_reader, readers[name], len(cores), run.sizes, copies
                        )
                        figures, peak_mb = run_fresh(program, cores)
                    for what, value in {**figures, (PEAK, "MB"): peak_mb}.items():
                        found[name].setdefault(what, []).append(value)
                except RuntimeError as error:
                    if not readers[name].other:
                        raise
                    failed.add(name)
                    notes[name], found[name] = f"not measured: {error}", {(SPEED, "images/s"): []}
            bar.update()
    date = now()
    for name, subject in subjects.items():
        run.record("remote", TITLE, subject, found[name], note=notes.get(name, ""), date=date)


def measure_reader(reader: Reader, parallel: int, sizes: Sizes, folder: Path) -> Figures:
    """Speed of a reader, and the seconds from its start to its first batch."""
    os.environ.update(CREDENTIALS | {"AWS_ENDPOINT_URL": reader.address})
    resolve_device("cpu")  # also makes malloc keep freed memory
    torch.set_num_threads(parallel)
    begin = time.perf_counter()
    batches = reader.batches(parallel, folder)
    next(batches)
    first_s = time.perf_counter() - begin
    images_per_second(batches, max(WARMUP_S, sizes.warmup_s))
    speed = images_per_second(batches, max(WINDOW_S, sizes.window_s))
    return {(SPEED, "images/s"): speed, (FIRST_BATCH, "s"): first_s}


def images_per_second(batches: Iterator[Any], seconds: float) -> float:
    """Speed of reading batches for this many seconds."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        count += len(next(batches)[0])
    return count / passed
