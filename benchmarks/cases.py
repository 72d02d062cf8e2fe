"""Data sets of the published experiments, which are generated if missing."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.baselines import Recipe
from benchmarks.generate import generate
from conf.schema import Config

# No resizing, cropping or flipping.
WHOLE_IMAGES = (
    *("data.resize=null", "data.crop=null", "data.random_crop=false"),
    *("data.random_resized_crop=null", "data.hflip=0", "data.vflip=0"),
)
# The tutorial validates on 1,856 of 153,856 pairs; at small sizes, that share would be no pair.
LOW_LIGHT = ("experiment=lowlight", "data.val_fraction=0.1")
# The tutorial's pairs with the transforms of the speed-up template.
PAIRS = (
    *(*LOW_LIGHT, "data.resize=256", "data.crop=[224,224]"),
    *("data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"),
)


@dataclass(frozen=True)
class Case:
    """A data set and the configuration of its experiment."""

    title: str
    overrides: tuple[str, ...]
    batch_size: int
    generator: str = ""
    """Name of the data set in `benchmarks.generate`; empty if nothing is generated."""
    size: int = 0
    """Number of generated samples."""
    below: str = ""
    """Subfolder of `data.root` with the files."""
    sides: tuple[str, ...] = ()
    """Folders of the inputs and of the targets below `data.root`; empty for images with classes."""

    @property
    def unit(self) -> str:
        return "pairs/s" if self.sides else "images/s"

    def root(self, data_dir: Path) -> Path:
        return data_dir / f"{self.generator}-{self.size}"

    def prepare(self, data_dir: Path) -> list[str]:
        """Return the overrides that select the data, which are generated if missing."""
        chosen = [*self.overrides, f"global_batch_size={self.batch_size}"]
        if self.generator:
            generate(self.generator, self.root(data_dir) / self.below, self.size)
            chosen.append(f"data.root={self.root(data_dir)}")
            chosen.append(f"data.cache_dir={data_dir / 'cache'}")
        return chosen

    def files(self, data_dir: Path) -> list[list[str]]:
        """Return the paths of the inputs and, for pairs, of the targets."""
        folders = [self.root(data_dir) / side for side in self.sides or (self.below,)]
        return [
            sorted(str(path) for path in folder.glob("*/*.*")) or files_in(folder)
            for folder in folders
        ]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("[!.]*.*"))


CASES = {
    "mnist": Case("digits of 28x28", (), 256),
    "caltech256": Case(
        *("JPEGs, resize 256, random crop 224", ("experiment=caltech256",), 32),
        *("caltech256", 400, "caltech256/256_ObjectCategories"),
    ),
    "pairs": Case(
        *("pairs of JPEGs, resize 256, random crop 224", PAIRS, 16, "lowlight", 160, ""),
        sides=("low", "high"),
    ),
    "deblur": Case(
        *("pairs of PNGs, random crop 256", ("experiment=deblur",), 2, "deblur", 24),
        sides=("train/blurry", "train/sharp"),
    ),
    "cells": Case(
        *("5-channel TIFFs, reading only", ("experiment=cells", *WHOLE_IMAGES), 64),
        *("cells", 3000),
    ),
    "cells_resized": Case(
        *("5-channel TIFFs, resize and crop", ("experiment=cells",), 64, "cells", 3000)
    ),
}


def recipe_of(cfg: Config) -> Recipe:
    """Return what the other pipelines do with an image of a configuration."""
    data = cfg.data
    low, high = data.value_range
    size = data.resize
    return Recipe(
        resize=size if size is None or isinstance(size, int) else (size[0], size[1]),
        crop=(data.crop[0], data.crop[1]) if isinstance(data.crop, list) else None,
        random_crop=data.random_crop,
        hflip=data.hflip,
        vflip=data.vflip,
        # Mean and std of x from (x (high - low) + low - mean) / std.
        mean=tuple((mean - low) / (high - low) for mean in data.mean or [0.0]),
        std=tuple(std / (high - low) for std in data.std or [1.0]),
    )


def pack(overrides: list[str], folder: Path) -> Path:
    """Decode the images of these overrides into a folder, if it does not exist."""
    if not folder.exists():
        command = [sys.executable, "-m", "loaders.pack", *overrides, f"out={folder.absolute()}"]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
    return folder
