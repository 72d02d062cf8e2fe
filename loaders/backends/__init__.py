"""The backends by name, one file each: different ways to read the rows of the plan.

All backends visit the same samples in the same order with the same augmentation.

Your own: `mine.py` in this folder with a function `mine_loader`, which takes a plan, the transform
of its `Rectangles` and the configuration, and returns a `Loader`; see `synthetic.py`.
"""

from collections.abc import Callable

import torch

from conf.names import find
from conf.schema import Config
from loaders.index import Index
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.transform import ImageTransform


def image_loader(
    cfg: Config, index: Index, device: torch.device, rank: int, world_size: int, train: bool
) -> Loader:
    """Build the loader of this rank's samples of an index, by `loader.name`.

    Raises:
        UserError: there is no backend of this name, or the samples do not fit the configuration.
    """
    # The images of a pack are read as those of files are.
    name = "pytorch" if cfg.loader.name == "packed" else cfg.loader.name
    new_loader: Callable[[Plan, ImageTransform, Config], Loader] = find(
        "loaders.backends", name, "loader.name", "{}_loader"
    )
    rectangles = Rectangles(index, cfg, world_size, train)
    plan = Plan(rectangles, cfg, rank, world_size)
    return new_loader(plan, ImageTransform(rectangles, cfg, device), cfg)
