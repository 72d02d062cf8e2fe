"""Keys of `loader=dali_reader`: those of `loader=dali`."""

from dataclasses import dataclass

from conf.loader.dali import DaliConfig


@dataclass
class DaliReaderConfig(DaliConfig):
    pass
