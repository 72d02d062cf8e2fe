"""What is measured on: the data sets of the published experiments, generated where they are not there."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conf.schema import Config
from loaders import Loader, build_loaders

REPOSITORY = Path(__file__).parents[1]
# Nothing is cut, resized or flipped: the images as they are in the files.
WHOLE_IMAGES = (
    *("data.resize=null", "data.crop=null", "data.random_crop=false"),
    *("data.random_resized_crop=null", "data.hflip=0", "data.vflip=0"),
)


@dataclass(frozen=True)
class Case:
    """A data set and what its experiment does with it."""

    name: str
    """As the results call it."""

    overrides: tuple[str, ...]
    """Hydra overrides that choose the experiment."""

    published_size: int
    """Samples of the published training set, or of the whole set where the split is ours."""

    batch_size: int
    """Samples per batch at small sizes; at full size the experiment's own."""

    unit: str = "images"
    """What a sample is: `images` or `pairs`."""

    generator: str = ""
    """Name that `loaders.generate` knows the data set by; empty: nothing to generate."""

    below: str = ""
    """Folder below `data.root` that holds the files."""


# The tutorial's 1,856 validating pairs of 153,856 would be none at small sizes.
LOW_LIGHT = ("experiment=lowlight", "data.val_fraction=0.1")
CASES = {
    case.name: case
    for case in [
        Case("mnist", (), 60_000, 256),
        Case(
            "caltech256",
            ("experiment=caltech256",),
            30_607,
            32,
            generator="caltech256",
            below="caltech256/256_ObjectCategories",
        ),
        Case("cells", ("experiment=cells",), 90_000, 64, generator="cells"),
        Case("deblur", ("experiment=deblur",), 2_103, 2, "pairs", generator="deblur"),
        Case("lowlight", LOW_LIGHT, 153_856, 16, "pairs", generator="lowlight"),
        # The tutorial's pairs with the speed-up template's steps: resize, shared crop, flips.
        Case(
            "pairs",
            (
                *(*LOW_LIGHT, "data.resize=256", "data.crop=[224,224]"),
                *("data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"),
            ),
            153_856,
            16,
            "pairs",
            generator="lowlight",
        ),
    ]
}
# Samples that are generated; deblur's include the third that its test folder holds.
SMALL = {"caltech256": 400, "cells": 3000, "deblur": 24, "lowlight": 160}
FULL = {"caltech256": 30_607, "cells": 90_000, "deblur": 3214, "lowlight": 153_856}


def make_config(*overrides: str) -> Config:
    """The configuration that these command-line overrides give.

    Raises:
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return cast(Config, compose("config", list(overrides)))


def prepare(case: Case, size: int, folder: Path) -> list[str]:
    """Generate the case's data below `folder`, if it is not there yet.

    Args:
        case: the data set.
        size: samples to generate.
        folder: where the generated sets lie.

    Returns:
        The overrides that choose it.

    Raises:
        ModuleNotFoundError: this checkout has no generator.
    """
    if not case.generator:
        return list(case.overrides)
    root = folder / f"{case.generator}-{size}"
    generate = importlib.import_module("loaders.generate").generate
    generate(case.generator, root / case.below, size)
    return [*case.overrides, f"data.root={root}", f"data.cache_dir={folder / 'cache'}"]


def loader_overrides(name: str, num_cores: int) -> list[str]:
    """What lets the loader `name` use so many CPU cores, in the way that is its fastest."""
    return [f"loader={name}", f"loader.num_threads={num_cores}", "loader.num_workers=0"]


def train_loader(cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1) -> Loader:
    return build_loaders(cfg, device, rank, world_size)[0]


def endless(loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Its batches, epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1
