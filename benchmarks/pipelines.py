"""Input pipelines to compare: the template's loaders, other libraries, and upper limits."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.baselines import Job, Recipe
from benchmarks.cases import WHOLE_IMAGES, Case
from benchmarks.interleave import CountItems
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Run, count_batches
from benchmarks.template import endless
from loaders import build_loaders
from loaders.index import open_splits
from loaders.pack import pack as pack_data


@dataclass(frozen=True)
class Pipeline:
    """An input pipeline from files to batches."""

    name: str
    """Name in the results; for the template's loaders, it starts with their override."""

    baseline: str = ""
    """Module and function in `benchmarks.baselines`; empty for the template's loaders."""

    uses_processes: bool = False
    """Parallel by worker processes instead of threads."""

    count: int | None = None
    """Number of workers or threads; None: one per CPU core of a device."""

    more: tuple[str, ...] = ()
    """Further overrides for the template's loaders."""

    @property
    def is_packed(self) -> bool:
        return self.name == "loader=packed"

    @property
    def is_limit(self) -> bool:
        return self.baseline.startswith("limits.")

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions that mean that it is not available; other libraries may raise any."""
        return (Exception,) if self.baseline else UNAVAILABLE

    def parallel(self, run: Run) -> int:
        return run.num_cores if self.count is None else self.count

    def subject(self, run: Run, settings: str = "") -> Subject:
        own_threads = 0 if self.baseline else 1
        count = self.parallel(run)
        counts = (count, own_threads) if self.uses_processes else (0, count)
        return Subject(self.name, *counts, settings=settings)

    def overrides(self, run: Run, case: Case, more: Sequence[str] = ()) -> list[str]:
        """Overrides that select a loader of the template; the data is packed first if necessary."""
        count = self.parallel(run)
        workers, threads = (count, 1) if self.uses_processes else (0, count)
        parallel = [f"loader.num_workers={workers}", f"loader.num_threads={threads}"]
        chosen = [self.name.partition(",")[0], *parallel, *self.more, *more]
        return [*chosen, f"loader.pack={pack(run, case, more)}"] if self.is_packed else chosen

    def batches(
        self, run: Run, case: Case, overrides: Sequence[str] = (), train: bool = True
    ) -> Iterable[Any]:
        """Training batches, endless or iterable repeatedly, or one epoch of validation batches."""
        if not self.baseline:
            chosen = self.overrides(run, case, overrides)
            loaders = build_loaders(run.config(case.name, *chosen), run.device)
            return endless(loaders[0]) if train else loaders[1]
        cfg = run.config(case.name, *overrides)
        module, _, baseline = self.baseline.partition(".")
        split, size = "train" if train else "val", run.sizes.data.get(case.generator)
        files, *targets = open_splits(cfg.data)[0 if train else 1].files
        job = Job(
            Recipe.of(cfg.data, train),
            *(list(files), list(targets[0]) if targets else [], cfg.global_batch_size),
            self.parallel(run) if train or not self.uses_processes else 0,
            run.device,
            run.data_dir / f"{module}-{split}-{case.name}-{size}",
        )
        load = getattr(importlib.import_module(f"benchmarks.baselines.{module}"), baseline)
        return load(job)

    def load(
        self, run: Run, case: Case, overrides: Sequence[str], count_items: CountItems
    ) -> NoReturn:
        """Count the samples of training batches on the device."""
        try:
            device = None if self.is_limit else run.device
            count_batches(self.batches(run, case, overrides), device, count_items)
        except self.errors as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


OURS = [
    Pipeline("loader=pytorch"),
    Pipeline("loader=dali"),
    Pipeline("loader=packed"),
]
PROCESSES = Pipeline("loader=pytorch, processes", uses_processes=True)
PIL = Pipeline("PIL + DataLoader", "dataloader.pil_images", uses_processes=True)
PIL_DRAFT = Pipeline(
    "PIL with draft + DataLoader", "dataloader.pil_draft_images", uses_processes=True
)
WHOLE = Pipeline("loader=pytorch, whole images", more=("data.reduced_decoding=false",))
TIFFFILE = Pipeline("tifffile + DataLoader", "dataloader.tifffile_images", uses_processes=True)
PIL_PAIRS = Pipeline("PIL pairs + DataLoader", "dataloader.pil_pairs", uses_processes=True)
DECODING = Pipeline("limit: decoding alone", "limits.decode")
TORCHCODEC = Pipeline("limit: decoding alone, torchcodec", "limits.decode_by_torchcodec")
RESIZING = Pipeline("limit: decoding and resizing", "limits.resize")
MINIMAL_DALI = Pipeline("minimal DALI", "dali.minimal")
PAIRS = [PIL_PAIRS, Pipeline("DALI external source", "dali.external_source"), *OURS]
CELLS = [TIFFFILE, MINIMAL_DALI, *OURS]
# Comparisons: case, title, pipelines and overrides.
COMPARISONS: list[tuple[str, str, list[Pipeline], tuple[str, ...]]] = [
    ("mnist", "digits of 28x28", OURS[:2], ()),
    (
        *("caltech256", "JPEGs, resize 256, random crop 224"),
        [
            PIL,
            Pipeline(
                "torchvision v2 + DataLoader", "dataloader.torchvision_images", uses_processes=True
            ),
            Pipeline(
                "torchvision v2, uint8 batches", "dataloader.torchvision_uint8", uses_processes=True
            ),
            Pipeline("WebDataset", "webdataset_shards.batches", uses_processes=True),
            Pipeline("LitData", "litdata_chunks.batches", uses_processes=True),
            Pipeline("SPDL around torchvision", "spdl_threads.batches"),
            *(MINIMAL_DALI, *OURS),
            *(Pipeline("limit: reading files", "limits.read"), DECODING, TORCHCODEC, RESIZING),
        ],
        (),
    ),
    (
        *("photographs", "JPEGs of 4000x3000, resize 256, random crop 224"),
        [PIL, PIL_DRAFT, MINIMAL_DALI, *OURS, WHOLE],
        (),
    ),
    ("pairs", "pairs of JPEGs, resize 256, random crop 224", [*PAIRS, DECODING, RESIZING], ()),
    ("lowlight", "pairs of JPEGs, resize 192", [*PAIRS, DECODING], ()),
    ("deblur", "pairs of PNGs, random crop 256", PAIRS, ()),
    ("cells", "5-channel TIFFs, reading only", CELLS, WHOLE_IMAGES),
    ("cells", "5-channel TIFFs, resize and crop", CELLS, ()),
]
# Sweeps over workers and threads: case, title, baseline and overrides.
SWEEPS: list[tuple[str, str, Pipeline, tuple[str, ...]]] = [
    ("caltech256", "caltech256, resize+crop", PIL, ()),
    ("cells", "cells, decode", TIFFFILE, WHOLE_IMAGES),
]


def pack(run: Run, case: Case, overrides: Sequence[str] = ()) -> Path:
    """Folder with the packed data of a case, which is packed if missing.

    Raises:
        ValueError: these images cannot be packed.
    """
    data = run.config(case.name, *overrides).data
    size = "x".join(str(data.resize).strip("[]").split(", "))
    folder = run.data_dir / f"packed-{case.name}-{Path(data.root).name}-{size}"
    if not (folder / "pack.json").exists():
        pack_data(data, folder)
    return folder
