"""The backends by name, one file each: different ways to execute the rows of the plan.

Your own: a `MineLoader` in `mine.py` in this folder.
"""

from collections.abc import Callable

import torch

from conf.names import find
from conf.schema import Config
from loaders.backends.loader import ImageLoader
from loaders.backends.tune import with_fastest_parallelism
from loaders.plan import PlanSampler

HELPERS = ("dataset", "loader", "shared", "transform", "tune")
"""Files that backends share, which `conf.names` leaves out."""


def backend(name: str) -> Callable[[PlanSampler, Config, torch.device], ImageLoader]:
    """Return the class or function that makes the loader `loader.name`.

    Raises:
        UserError: there is no backend of this name.
    """
    return find("loaders.backends", name, "loader.name", "{}Loader")
