"""Data sets of the published experiments, for the benchmarks; missing ones are generated."""

from dataclasses import dataclass

# No resizing, cropping or flipping.
WHOLE_IMAGES = (
    *("data.resize=null", "data.crop=null", "data.random_crop=false"),
    *("data.random_resized_crop=null", "data.hflip=0", "data.vflip=0"),
)
# Photographs of a phone, cropped as in the I/O tuning guide.
PHOTOGRAPHS = (
    *("data=imagefolder", "data.random_resized_crop=null", "data.random_crop=true"),
    *("model=small_cnn", "global_batch_size=64"),
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

    name: str
    """Name in the results."""

    overrides: tuple[str, ...]
    """Hydra overrides that select the experiment."""

    published_size: int
    """Number of samples of the published training set, or of the whole set if it has no split."""

    batch_size: int
    """Batch size at small sizes; at full size, the experiment's own is used."""

    unit: str = "images"
    """Unit of a sample: `images` or `pairs`."""

    generator: str = ""
    """Name of the data set in `benchmarks.generate`; empty if nothing is generated."""

    below: str = ""
    """Subfolder of `data.root` with the files."""


CASES = {
    case.name: case
    for case in [
        Case("mnist", (), 60_000, 256),
        Case(
            *("caltech256", ("experiment=caltech256",), 30_607, 32, "images", "caltech256"),
            below="caltech256/256_ObjectCategories",
        ),
        Case("photographs", PHOTOGRAPHS, 10_000, 8, "images", "photographs"),
        Case("cells", ("experiment=cells",), 90_000, 64, "images", "cells"),
        Case("deblur", ("experiment=deblur",), 2_103, 2, "pairs", "deblur"),
        Case("lowlight", LOW_LIGHT, 153_856, 16, "pairs", "lowlight"),
        Case("pairs", PAIRS, 153_856, 16, "pairs", "lowlight"),
    ]
}
# Number of generated samples; of deblur, a third is in the test folder.
SMALL = {"caltech256": 400, "photographs": 50, "cells": 3000, "deblur": 24, "lowlight": 160}
FULL = {
    **{"caltech256": 30_607, "photographs": 400, "cells": 90_000},
    **{"deblur": 3214, "lowlight": 153_856},
}
