"""The backends: different ways to execute the rows of the plan."""

import importlib
from collections.abc import Callable

import torch

from conf.errors import unknown_name
from conf.schema import Config
from loaders.backends.loader import ImageLoader
from loaders.backends.tune import with_fastest_parallelism
from loaders.plan import PlanSampler

# name of the backend -> what makes its loader; a backend is imported only when it is used
BACKENDS = {
    "pytorch": "loaders.backends.pytorch.PyTorchLoader",
    "dali": "loaders.backends.dali.DALILoader",
    "dali_reader": "loaders.backends.dali_reader.new_loader",
    "packed": "loaders.backends.pytorch.PyTorchLoader",  # part: packed
    "synthetic": "loaders.backends.synthetic.SyntheticLoader",
}


def backend(name: str) -> Callable[[PlanSampler, Config, torch.device], ImageLoader]:
    """Return the class or function that makes the loader `loader.name`.

    Raises:
        UserError: there is no backend of this name.
    """
    if name not in BACKENDS:
        raise unknown_name("loader.name", name, BACKENDS)
    module, _, class_name = BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(module), class_name)
