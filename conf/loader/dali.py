"""Keys of `loader=dali`."""

from dataclasses import dataclass

from conf.groups import LoaderConfig
from conf.ranges import FROM_1, SHARE, key


@dataclass
class DaliConfig(LoaderConfig):
    prefetch_queue_depth: int = key(2, FROM_1)
    """Batches prepared ahead."""

    hw_decoder_load: float = key(0.65, SHARE)
    """Share of the JPEGs for the GPU's hardware decoder, if it has one."""
