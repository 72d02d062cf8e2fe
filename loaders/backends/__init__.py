"""The backends: different ways to execute the rows of the plan."""

import importlib

from conf.errors import unknown_name
from loaders.backends.loader import ImageLoader
from loaders.backends.tune import with_fastest_parallelism

# name of the backend -> its class; a backend is imported only when it is used
BACKENDS = {
    "pytorch": "loaders.backends.pytorch.PyTorchLoader",
    "dali": "loaders.backends.dali.DALILoader",
    "dali native": "loaders.backends.dali_reader.NativeDALILoader",
    "packed": "loaders.backends.pytorch.PyTorchLoader",  # part: packed
    "synthetic": "loaders.backends.synthetic.SyntheticLoader",
}


def backend(name: str, reader: str = "plan") -> type[ImageLoader]:
    """Return the class that `loader.name` and `loader.reader` choose.

    Raises:
        UserError: there is no backend of this name.
    """
    names = [name for name in BACKENDS if " " not in name]
    if name not in names:
        raise unknown_name("loader.name", name, names)
    module, _, class_name = BACKENDS["dali native" if reader == "native" else name].rpartition(".")
    return getattr(importlib.import_module(module), class_name)


__all__ = [
    "BACKENDS",
    "ImageLoader",
    "backend",
    "with_fastest_parallelism",
]
