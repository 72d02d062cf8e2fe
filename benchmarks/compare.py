"""Speed of the template's loaders beside other libraries, for the same files and transforms.

The first program of each table is plain code with PIL or tifffile. All have as many workers, or
threads, as there are CPU cores.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.baselines import Job
from benchmarks.cases import CASES, Case, pack, recipe_of
from benchmarks.measure import CountItems, measure
from benchmarks.records import Subject, now, num_cores, record
from benchmarks.tables import LIMIT, SPEED
from conf.cli import load_config
from loaders import build_loaders

PEERS = {"webdataset": "webdataset", "litdata": "litdata", "nvidia.dali": "nvidia-dali-cuda120"}
"""Packages of other programs, by the module that they bring."""


@dataclass(frozen=True)
class Pipeline:
    """An input pipeline from files to batches."""

    name: str
    """For the template's loaders, their override."""
    baseline: str = ""
    """Module and function in `benchmarks.baselines`; empty for the template's loaders."""
    uses_processes: bool = False
    """Parallel by worker processes instead of threads."""

    def subject(self, parallel: int) -> Subject:
        return Subject(self.name, *((parallel, 0) if self.uses_processes else (0, parallel)))

    def load(
        self,
        case: Case,
        overrides: list[str],
        data_dir: Path,
        parallel: int,
        count_items: CountItems,
    ) -> None:
        """Count the samples of training batches."""
        cfg = load_config(overrides)
        if not self.baseline:
            count_batches(endless(build_loaders(cfg, torch.device("cpu"))[0]), count_items)
        module, _, function = self.baseline.partition(".")
        files, *targets = case.files(data_dir)
        folder = data_dir / f"{module}-{case.generator}-{case.size}"
        sources = files, targets[0] if targets else []
        job = Job(recipe_of(cfg), *sources, cfg.global_batch_size, parallel, folder=folder)
        batches_of = getattr(import_module(f"benchmarks.baselines.{module}"), function)
        count_batches(batches_of(job), count_items)

    def overrides(self, case: Case, data_dir: Path, parallel: int) -> list[str]:
        """Overrides that select the data and the loader; data are packed first if necessary."""
        chosen = case.prepare(data_dir)
        if self.baseline:
            return chosen
        workers, threads = (parallel, 1) if self.uses_processes else (0, parallel)
        more = [self.name, f"loader.num_workers={workers}", f"loader.num_threads={threads}"]
        if self.name == "loader=packed":
            title = case.title.replace(" ", "-").replace(",", "")
            folder = pack(chosen, data_dir / f"packed-{title}-{case.size}")
            more.append(f"loader.pack={folder}")
        return [*chosen, *more]


PIL = Pipeline("PIL + DataLoader", "dataloader.pil_images", uses_processes=True)
PIL_PAIRS = Pipeline("PIL pairs + DataLoader", "dataloader.pil_pairs", uses_processes=True)
TIFFFILE = Pipeline("tifffile + DataLoader", "dataloader.tifffile_images", uses_processes=True)
TORCHVISION = Pipeline(
    "torchvision v2 + DataLoader", "dataloader.torchvision_images", uses_processes=True
)
MINIMAL_DALI = Pipeline("minimal DALI", "dali.minimal")
DECODING = Pipeline(LIMIT, "limits.decode")
OURS = [
    Pipeline("loader=pytorch"),
    Pipeline("loader=dali"),
    Pipeline("loader=packed"),
]
PAIRS = [PIL_PAIRS, *OURS]
COMPARISONS = {
    "mnist": OURS[:2],
    "caltech256": [
        PIL,
        TORCHVISION,
        Pipeline("WebDataset", "webdataset_shards.batches", True),
        Pipeline("LitData", "litdata_chunks.batches", True),
        *(MINIMAL_DALI, *OURS, DECODING),
    ],
    "pairs": [*PAIRS, DECODING],
    "deblur": PAIRS,
    "cells": [TIFFFILE, MINIMAL_DALI, *OURS],
    "cells_resized": [TIFFFILE, MINIMAL_DALI, *OURS],
}


def endless(loader: Any) -> Iterator[Any]:
    """Batches of a loader of the template, epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def count_batches(batches: Iterable[Any], count_items: CountItems) -> NoReturn:
    """Count the samples of batch after batch, endlessly; tensors, sequences, or tuples of these."""
    while True:
        batch = None
        for batch in batches:
            count_items(len(batch[0]) if isinstance(batch, tuple) else len(batch))
        if batch is None:
            raise ValueError("no batch in an epoch; use more data or a smaller batch size")


def main(
    path: Path,
    data_dir: Path,
    cases: list[str],
    repeats: int,
    window_s: float,
    warmup_s: float = 1.0,
) -> None:
    """Measure the programs of each case in turns, and append their rows to a file."""
    parallel = num_cores()
    for name in cases:
        case, work, reasons = CASES[name], {}, {}
        for pipeline in COMPARISONS[name]:
            subject = pipeline.subject(parallel)
            try:
                overrides = pipeline.overrides(case, data_dir, parallel)
            except Exception as error:
                reasons[subject] = f"{type(error).__name__}: {error}"
                continue
            work[subject] = partial(pipeline.load, case, overrides, data_dir, parallel)
        print(f"{case.title}: {len(work)} programs", flush=True)
        found = measure(work, warmup_s, window_s, repeats)
        date = now()
        for subject in [pipeline.subject(parallel) for pipeline in COMPARISONS[name]]:
            outcome = found.get(subject, reasons.get(subject, ""))
            values = [] if isinstance(outcome, str) else outcome
            note = f"not measured: {outcome}" if isinstance(outcome, str) else ""
            figures = {(SPEED, case.unit): values}
            record(path, "compare", case.title, subject, figures, note, date)
