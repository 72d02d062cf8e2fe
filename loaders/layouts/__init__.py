"""The layouts of data, by name, one file each.

Your own: `scenes.py` in this folder with a function `scenes`, which takes `cfg.data` and the wanted
splits, some of `train`, `val` and `test`, and returns the `Index` of each of them that there is, by
split; those of `train` and `val`, always. A layout of other data than images has a function
`build_loaders` in its place, like `loaders.build_loaders()`.
"""

from types import ModuleType

from conf.names import file_of
from conf.schema import DataConfig


def layout_of(data: DataConfig) -> ModuleType:
    """Import the file of `data.layout`.

    Raises:
        UserError: there is no such layout.
    """
    return file_of("loaders.layouts", data.layout, "data.layout")


def has_images(data: DataConfig) -> bool:
    """Return False if the layout builds its loaders itself."""
    return not hasattr(layout_of(data), "build_loaders")
