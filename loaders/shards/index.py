"""The index of samples whose files are in shards."""

from dataclasses import dataclass

import numpy as np

from conf.schema import DataConfig
from loaders.epoch import ORDER, EpochSampler
from loaders.index import Index
from loaders.shards.files import Shards
from loaders.shards.windows import block_shuffle, next_shards


@dataclass(frozen=True, kw_only=True)
class ShardIndex(Index):
    """An index whose files' content is read from shards."""

    by_path = False
    fix = "pack the data again"

    shards: Shards

    def read_bytes(self, sample: int, side: int) -> bytes:
        try:
            return self.shards.read(sample, side)
        except (OSError, MemoryError) as error:
            raise self.bad_file(sample, side, error) from error

    def read_raw(self, sample: int, image: np.ndarray) -> None:
        image[:] = self.read_image(sample)

    def place_of(self, sample: int, side: int) -> str:
        return f"{self.shards.place(sample, side)} ({self.files[side][sample]})"

    @property
    def storage_order(self) -> list[int]:
        return self.shards.order.tolist()

    def order_name(self, data: DataConfig) -> str:
        if data.shuffle != "window":
            return ORDER
        return f"{ORDER}, windows of {data.shuffle_window} shards of {self.shards.fingerprint}"

    def shuffled(self, positions: np.ndarray, sampler: EpochSampler) -> np.ndarray:
        if sampler.data.shuffle != "window":
            return super().shuffled(positions, sampler)
        window = sampler.data.shuffle_window
        return block_shuffle(positions, self.shards, window, sampler.seed, sampler.epoch)

    def fetch(self, rows: np.ndarray, sampler: EpochSampler) -> None:
        """Wait until the shards of a batch can be read, and start to fetch the following ones."""
        shards, count = self.shards, sampler.data.shuffle_window
        # First, because this marks them as used: the following ones do not replace them.
        shards.fetch(np.unique(shards.spans[0]["shard"][rows["sample"]]).tolist())
        position = int(rows["position"][0])
        if not sampler.train:
            first = int(np.searchsorted(shards.starts, position, side="right"))
            shards.prefetch(range(first, len(shards.starts) - 1)[:count])
        elif sampler.data.shuffle == "window":
            shards.prefetch(next_shards(position, shards, count, sampler.seed, sampler.epoch))
