"""How fast each loader delivers each experiment's data, beside the write-ups' own ways of loading."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from benchmarks.baselines import Recipe
from benchmarks.cases import WHOLE_IMAGES, Case, endless, loader_overrides, train_loader
from benchmarks.out_of_band import pack
from benchmarks.run import UNAVAILABLE, Draw, Run, Subject, draw_from
from conf.schema import Config
from loaders.layouts import build_index

READ, DECODE, ALL = "step=read", "step=decode", "step=resize+crop"


def main(run: Run) -> None:
    """Reading only, decoding, and with resize and crop; all loaders on all CPU cores of a device."""
    for case in run.chosen("mnist", "caltech256", "cells", "deblur", "lowlight"):
        with suppress(*UNAVAILABLE):  # which each subject reports
            run.case_overrides(case.name)  # generates the data once for all subjects
        run.compare(
            "loaders",
            case.name,
            {**baselines(run, case), **limits(run, case), **ours(run, case)},
            unit=f"{case.unit}/s",
            epoch_size=case.published_size,
        )


def baselines(run: Run, case: Case) -> dict[Subject, Callable[[], Draw]]:
    """The write-ups' own ways."""
    workers, threads = {"num_workers": run.num_cores}, {"num_threads": run.num_cores}
    builders: dict[Subject, Callable[[], Draw]] = {}
    if case.name == "caltech256":
        builders[Subject("PIL + DataLoader", settings=ALL, **workers)] = partial(
            plain, run, case, "pil_imagefolder", workers
        )
    if case.name == "cells":
        for step, extra in [(DECODE, WHOLE_IMAGES), (ALL, ())]:
            builders[Subject("tifffile + DataLoader", settings=step, **workers)] = partial(
                plain, run, case, "tifffile_cells", workers, *extra
            )
    if case.unit == "pairs":
        builders[Subject("PIL pairs + DataLoader", settings=ALL, **workers)] = partial(
            plain, run, case, "pil_pairs", workers
        )
        builders[Subject("DALI external source", settings=ALL, **threads)] = partial(
            plain, run, case, "dali_external_source", threads
        )
    return builders


def limits(run: Run, case: Case) -> dict[Subject, Callable[[], Draw]]:
    """What a loader that reads or decodes the files with these cores cannot beat.

    Of Pillow, which decodes PNG, and tifffile there are faster relatives: they set no limit.
    """
    if not case.generator or not has_all_steps(run, case):
        return {}
    threads = {"num_threads": run.num_cores}
    names = {"deblur": "decoding alone (Pillow)", "cells": "decoding alone (tifffile)"}
    decode = names.get(case.name, "limit: decoding alone")
    return {
        Subject("limit: reading files", settings=READ, **threads): partial(
            decoding, run, case, "read"
        ),
        Subject(decode, settings=DECODE, **threads): partial(decoding, run, case, "decode"),
    }


def has_all_steps(run: Run, case: Case) -> bool:
    """Whether reading and decoding are measured alone too: at small sizes only of single images."""
    return run.sizes.every_combination or case.unit == "images"


def ours(run: Run, case: Case) -> dict[Subject, Callable[[], Draw]]:
    threads = {"num_threads": run.num_cores}
    builders: dict[Subject, Callable[[], Draw]] = {}
    for name in ("pytorch", "dali"):
        # Caltech's images differ in size
        if case.generator and case.name != "caltech256" and has_all_steps(run, case):
            builders[Subject(f"loader={name}", settings=DECODE, **threads)] = partial(
                our_loader, run, case, name, *WHOLE_IMAGES
            )
        builders[Subject(f"loader={name}", settings=ALL, **threads)] = partial(
            our_loader, run, case, name
        )
    if case.generator:
        builders[Subject("loader=packed", settings=ALL, **threads)] = partial(
            packed_loader, run, case
        )
    return builders


def our_loader(run: Run, case: Case, name: str, *overrides: str) -> Draw:
    """One of the template's loaders with all CPU cores of a device."""
    cfg = run.config(case.name, *loader_overrides(name, run.num_cores), *overrides)
    return draw_from(endless(train_loader(cfg, run.device)))


def packed_loader(run: Run, case: Case) -> Draw:
    """`loader=packed`; packs first if there is no pack of this data yet."""
    folder, _ = pack(run, case)
    return our_loader(run, case, "packed", f"loader.pack={folder}")


def plain(run: Run, case: Case, module: str, options: dict[str, Any], *overrides: str) -> Draw:
    """A baseline on the files of the case's training split.

    Args:
        run: sizes and overrides.
        case: the data.
        module: name in `benchmarks.baselines`; its `batches()` takes the files, for pairs also the
            targets' files, a recipe, the batch size and the options.
        options: further arguments of `batches()`.
        overrides: of the case's configuration.
    """
    cfg = run.config(case.name, *overrides)
    return draw_from(baseline(cfg, module, options, files_of(cfg)), run.device)


def files_of(cfg: Config, train: bool = True) -> tuple[list[str], ...]:
    """Paths of a split's images and, for pairs, of their targets."""
    return tuple(list(paths) for paths in build_index(cfg.data)[0 if train else 1].files)


def baseline(
    cfg: Config,
    module: str,
    options: dict[str, Any],
    files: tuple[list[str], ...],
    train: bool = True,
) -> Iterable[Any]:
    """Batches of these files through a baseline, with the configuration's steps and batch size."""
    import importlib

    recipe = Recipe.of(cfg.data)
    return importlib.import_module(f"benchmarks.baselines.{module}").batches(
        *files,
        recipe if train else recipe.for_evaluation(),
        cfg.global_batch_size,
        **options,
    )


def decoding(run: Run, case: Case, function: str) -> Draw:
    """A limit, a function of `decode_only`; a pair counts once, although two files are read."""
    from benchmarks.baselines import decode_only

    cfg = run.config(case.name)
    files = [path for sample in zip(*files_of(cfg), strict=True) for path in sample]
    sides = 2 if case.unit == "pairs" else 1
    shorter_side: Any = cfg.data.resize
    crop: Any = cfg.data.crop and tuple(cfg.data.crop)
    functions: dict[str, Callable[[str], np.ndarray]] = {
        "read": decode_only.read,
        "decode": decode_only.decode,
        "resize": lambda path: decode_only.resize(path, shorter_side, crop),
    }
    batch_size = sides * cfg.global_batch_size
    draw = draw_from(decode_only.batches(files, batch_size, run.num_cores, functions[function]))
    return lambda: draw() // sides
