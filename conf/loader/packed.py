"""Keys of `loader=packed` alone."""

from dataclasses import dataclass

from conf.groups import LoaderConfig


@dataclass
class PackedConfig(LoaderConfig):
    pack: str | None = None
    """Folder that `python -m loaders.pack ... out=DIR` wrote."""
