"""Ways of loading a case's files: the template's loaders, others' code, and what no loader can beat."""

import importlib
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import template
from benchmarks.baselines import Job, Recipe, limits
from benchmarks.cases import Case
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Builder, Draw, Run, draw_from
from benchmarks.template import build_loaders, endless, files_of

MOST_COPIED = 4000  # images


@dataclass(frozen=True)
class Way:
    """How files become batches."""

    name: str
    """As the results call it; without `function` the override that chooses one of our loaders."""

    function: str = ""
    """Module and name of one of others' in `benchmarks.baselines`."""

    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Its further arguments."""

    by_processes: bool = False
    """Parallel by worker processes; else by threads."""

    @property
    def is_packed(self) -> bool:
        return self.name == "loader=packed"

    def subject(self, run: Run, settings: str = "", count: int | None = None) -> Subject:
        """With `count` workers or threads, by default one for each CPU core of a device."""
        count = run.num_cores if count is None else count
        counts = (count, 0) if self.by_processes else (0, count)
        return Subject(self.name, *counts, settings=settings)

    def overrides(
        self, run: Run, case: Case, more: Sequence[str] = (), count: int | None = None
    ) -> list[str]:
        """What chooses one of our loaders; packs first if need be."""
        count = run.num_cores if count is None else count
        chosen = [self.name, "loader.num_workers=0", f"loader.num_threads={count}", *more]
        return [*chosen, f"loader.pack={pack(run, case, more)[0]}"] if self.is_packed else chosen

    def batches(
        self,
        run: Run,
        case: Case,
        overrides: Sequence[str] = (),
        count: int | None = None,
        train: bool = True,
    ) -> Iterable[Any]:
        """Batches of the training split without end or again and again, or one epoch of validation."""
        count = run.num_cores if count is None else count
        if not self.function:
            chosen = self.overrides(run, case, overrides, count)
            loaders = build_loaders(run.config(case.name, *chosen), run.device)
            return endless(loaders[0]) if train else loaders[1]
        cfg = run.config(case.name, *overrides)
        recipe = Recipe.of(cfg.data)
        module, _, function = self.function.partition(".")
        split, size = "train" if train else "val", run.sizes.data.get(case.generator)
        files, *targets = files_of(cfg, train)
        job = Job(
            recipe if train else recipe.for_evaluation(),
            *(files, targets[0] if targets else [], cfg.global_batch_size),
            count if train or not self.by_processes else 0,
            run.device,
            run.data_dir / f"{module}-{split}-{case.name}-{size}",
        )
        load = getattr(importlib.import_module(f"benchmarks.baselines.{module}"), function)
        return load(job, **self.options)

    def draw(
        self, run: Run, case: Case, overrides: Sequence[str] = (), count: int | None = None
    ) -> Draw:
        """For training, batches that lie on the device."""
        try:
            draw = draw_from(self.batches(run, case, overrides, count), run.device)
            draw()
        except self.errors as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return draw

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What says that it cannot be had here; what other libraries raise is theirs to choose."""
        return (Exception,) if self.function else UNAVAILABLE


OURS = [Way("loader=pytorch"), Way("loader=dali"), Way("loader=packed")]
PIL = Way("PIL + DataLoader", "dataloader.pil_images", by_processes=True)
TIFFFILE = Way("tifffile + DataLoader", "dataloader.tifffile_images", by_processes=True)
PIL_PAIRS = Way("PIL pairs + DataLoader", "dataloader.pil_pairs", by_processes=True)
EXTERNAL_SOURCE = Way("DALI external source", "dali.external_source")
PHOTOS = [
    PIL,
    Way("torchvision v2 + DataLoader", "dataloader.torchvision_images", by_processes=True),
    Way("torchvision v2, uint8 batches", "dataloader.torchvision_uint8", by_processes=True),
    Way("WebDataset", "webdataset_shards.batches", by_processes=True),
    Way("LitData", "litdata_chunks.batches", by_processes=True),
    Way("SPDL", "spdl_threads.own"),
    Way("SPDL around torchvision", "spdl_threads.around_torchvision"),
    Way("FFCV, JPEG mode", "ffcv_beton.batches"),
    Way("minimal DALI", "dali.minimal"),
]
PAIRS = [PIL_PAIRS, EXTERNAL_SOURCE]
CELLS = [TIFFFILE, Way("minimal DALI", "dali.minimal", {"channels": 5})]


def limit(run: Run, name: str, case: Case, step: str, settings: str = "") -> dict[Subject, Builder]:
    """One of the limits by its subject; `step`: `read`, `decode`, `resize`, `copy` or `copy to float32`."""
    subject = Subject(name, num_threads=run.num_cores, settings=settings)
    return {subject: partial(_limit, run, case, step)}


def _limit(run: Run, case: Case, step: str) -> Draw:
    cfg = run.config(case.name)
    files = files_of(cfg)
    size: Any = cfg.data.resize
    crop: Any = cfg.data.crop and tuple(cfg.data.crop)
    if step.startswith("copy"):
        # Noise of the size that the images have after resizing.
        shape = (min(MOST_COPIED, len(files[0])), size, size * 4 // 3, 3)
        pixels = limits.write_pixels(run.data_dir / f"noise-{shape[0]}.bin", shape)
        as_float = step == "copy to float32"
        batch_size = cfg.global_batch_size
        batches = limits.copies(pixels, crop, batch_size, run.num_cores, as_float)
        return lambda: sum(map(len, next(batches)))
    functions: dict[str, Any] = {
        "read": limits.read,
        "decode": limits.decode,
        "resize": partial(limits.resize, shorter_side=size, crop=crop),
    }
    images = itertools.cycle(path for sample in zip(*files, strict=True) for path in sample)
    batch_size = len(files) * cfg.global_batch_size
    draw = draw_from(limits.on_threads(functions[step], images, batch_size, run.num_cores))
    return lambda: draw() // len(files)  # a pair counts once


def pack(run: Run, case: Case, overrides: Sequence[str] = ()) -> tuple[Path, float]:
    """Pack the case's data, if there is no pack of it yet.

    Returns:
        The folder of the pack, and the seconds that making it took (kept beside the folder).

    Raises:
        ValueError: these images cannot be packed.
    """
    data = run.config(case.name, *overrides).data
    size = "x".join(str(data.resize).strip("[]").split(", "))
    folder = run.data_dir / f"packed-{case.name}-{Path(data.root).name}-{size}"
    record = folder.with_suffix(".seconds")
    if not record.exists():
        start = time.perf_counter()
        template.pack(data, folder)
        record.write_text(f"{time.perf_counter() - start:.3f}\n")
    return folder, float(record.read_text())
