"""What is measured on: the data sets of the published experiments, generated where they are not there."""

from dataclasses import dataclass

# Nothing is cut, resized or flipped: the images as they are in the files.
WHOLE_IMAGES = (
    *("data.resize=null", "data.crop=null", "data.random_crop=false"),
    *("data.random_resized_crop=null", "data.hflip=0", "data.vflip=0"),
)
# What a phone takes, for the crops of the I/O tuning guide.
PHOTOGRAPHS = (
    *("data=imagefolder", "data.random_crop=true", "data.hflip=0.5", "global_batch_size=64"),
)
# The tutorial's 1,856 validating pairs of 153,856 would be none at small sizes.
LOW_LIGHT = ("experiment=lowlight", "data.val_fraction=0.1")
# The tutorial's pairs with the speed-up template's steps: resize, shared crop, flips.
PAIRS = (
    *(*LOW_LIGHT, "data.resize=256", "data.crop=[224,224]"),
    *("data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"),
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
    """Name that `benchmarks.generate` knows the data set by; empty: nothing to generate."""

    below: str = ""
    """Folder below `data.root` that holds the files."""


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
# Samples that are generated; deblur's include the third that its test folder holds.
SMALL = {"caltech256": 400, "photographs": 50, "cells": 3000, "deblur": 24, "lowlight": 160}
FULL = {
    **{"caltech256": 30_607, "photographs": 400, "cells": 90_000},
    **{"deblur": 3214, "lowlight": 153_856},
}
