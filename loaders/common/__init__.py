"""What all loaders share: facts about samples, the form of batches, limits of the machine."""

from loaders.common.batch import map_leaves, num_samples, part, tensors_of
from loaders.common.info import DataInfo
from loaders.common.limits import (
    LimitError,
    cpus_per_rank,
    explain,
    limits_explained,
    torch_threads,
)
