"""Keys of `data=own` alone."""

from dataclasses import dataclass

from conf.groups import DataConfig


@dataclass
class OwnConfig(DataConfig):
    name: str | None = None
    """Name of a file in `loaders/own/`."""
