"""Ways of loading a case's files: the template's loaders, others' code, and what no loader can beat."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.baselines import Job, Recipe
from benchmarks.cases import WHOLE_IMAGES, Case
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Run, fetch
from benchmarks.template import endless
from benchmarks.turns import Count
from loaders import build_loaders
from loaders.open import open_splits
from loaders.pack import pack as pack_data


@dataclass(frozen=True)
class Way:
    """How files become batches."""

    name: str
    """As the results call it; without `function` it begins with the override that chooses our loader."""

    function: str = ""
    """Module and name of one of others' in `benchmarks.baselines`."""

    by_processes: bool = False
    """Parallel by worker processes; else by threads."""

    count: int | None = None
    """Workers or threads; by default one for each CPU core of a device."""

    more: tuple[str, ...] = ()
    """Of our loaders: further overrides."""

    @property
    def is_packed(self) -> bool:
        return self.name == "loader=packed"

    @property
    def is_limit(self) -> bool:
        return self.function.startswith("limits.")

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What says that it cannot be had here; what other libraries raise is theirs to choose."""
        return (Exception,) if self.function else UNAVAILABLE

    def parallel(self, run: Run) -> int:
        return run.num_cores if self.count is None else self.count

    def subject(self, run: Run, settings: str = "") -> Subject:
        own_threads = 0 if self.function else 1
        count = self.parallel(run)
        counts = (count, own_threads) if self.by_processes else (0, count)
        return Subject(self.name, *counts, settings=settings)

    def overrides(self, run: Run, case: Case, more: Sequence[str] = ()) -> list[str]:
        """What chooses one of our loaders; packs first if need be."""
        count = self.parallel(run)
        workers, threads = (count, 1) if self.by_processes else (0, count)
        parallel = [f"loader.num_workers={workers}", f"loader.num_threads={threads}"]
        chosen = [self.name.partition(",")[0], *parallel, *self.more, *more]
        return [*chosen, f"loader.pack={pack(run, case, more)}"] if self.is_packed else chosen

    def batches(
        self, run: Run, case: Case, overrides: Sequence[str] = (), train: bool = True
    ) -> Iterable[Any]:
        """Batches of the training split without end or again and again, or one epoch of validation."""
        if not self.function:
            chosen = self.overrides(run, case, overrides)
            loaders = build_loaders(run.config(case.name, *chosen), run.device)
            return endless(loaders[0]) if train else loaders[1]
        cfg = run.config(case.name, *overrides)
        module, _, function = self.function.partition(".")
        split, size = "train" if train else "val", run.sizes.data.get(case.generator)
        files, *targets = open_splits(cfg.data)[0 if train else 1].files
        job = Job(
            Recipe.of(cfg.data, train),
            *(list(files), list(targets[0]) if targets else [], cfg.global_batch_size),
            self.parallel(run) if train or not self.by_processes else 0,
            run.device,
            run.data_dir / f"{module}-{split}-{case.name}-{size}",
        )
        load = getattr(importlib.import_module(f"benchmarks.baselines.{module}"), function)
        return load(job)

    def load(self, run: Run, case: Case, overrides: Sequence[str], count: Count) -> NoReturn:
        """Count the samples of batches for training that lie on the device."""
        try:
            device = None if self.is_limit else run.device
            fetch(self.batches(run, case, overrides), device, count)
        except self.errors as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


OURS = [Way("loader=pytorch"), Way("loader=dali"), Way("loader=packed")]
PROCESSES = Way("loader=pytorch, processes", by_processes=True)
PIL = Way("PIL + DataLoader", "dataloader.pil_images", by_processes=True)
PIL_DRAFT = Way("PIL with draft + DataLoader", "dataloader.pil_draft_images", by_processes=True)
WHOLE = Way("loader=pytorch, whole images", more=("data.reduced_decoding=false",))
TIFFFILE = Way("tifffile + DataLoader", "dataloader.tifffile_images", by_processes=True)
PIL_PAIRS = Way("PIL pairs + DataLoader", "dataloader.pil_pairs", by_processes=True)
DECODING = Way("limit: decoding alone", "limits.decode")
RESIZING = Way("limit: decoding and resizing", "limits.resize")
MINIMAL_DALI = Way("minimal DALI", "dali.minimal")
PAIRS = [PIL_PAIRS, Way("DALI external source", "dali.external_source"), *OURS]
CELLS = [TIFFFILE, MINIMAL_DALI, *OURS]
# What is compared: case, title, ways and overrides.
COMPARISONS: list[tuple[str, str, list[Way], tuple[str, ...]]] = [
    ("mnist", "digits of 28x28", OURS[:2], ()),
    (
        *("caltech256", "JPEGs, resize 256, random crop 224"),
        [
            PIL,
            Way("torchvision v2 + DataLoader", "dataloader.torchvision_images", by_processes=True),
            Way("torchvision v2, uint8 batches", "dataloader.torchvision_uint8", by_processes=True),
            Way("WebDataset", "webdataset_shards.batches", by_processes=True),
            Way("LitData", "litdata_chunks.batches", by_processes=True),
            Way("SPDL around torchvision", "spdl_threads.batches"),
            *(MINIMAL_DALI, *OURS),
            *(Way("limit: reading files", "limits.read"), DECODING, RESIZING),
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
# What is swept over workers and threads: case, title, the write-up's way and overrides.
SWEEPS: list[tuple[str, str, Way, tuple[str, ...]]] = [
    ("caltech256", "caltech256, resize+crop", PIL, ()),
    ("cells", "cells, decode", TIFFFILE, WHOLE_IMAGES),
]


def pack(run: Run, case: Case, overrides: Sequence[str] = ()) -> Path:
    """The folder of a pack of the case's data, which is made if there is none.

    Raises:
        ValueError: these images cannot be packed.
    """
    data = run.config(case.name, *overrides).data
    size = "x".join(str(data.resize).strip("[]").split(", "))
    folder = run.data_dir / f"packed-{case.name}-{Path(data.root).name}-{size}"
    if not (folder / "pack.json").exists():
        pack_data(data, folder)
    return folder
