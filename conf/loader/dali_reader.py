"""Keys of `loader=dali_reader`: those of `loader=dali`."""

from conf.loader.dali import DaliConfig

DaliReaderConfig = DaliConfig
