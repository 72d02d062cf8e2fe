"""What all loaders share: their contract, the form of batches, limits of the machine."""

from loaders.common.batch import map_leaves, num_samples, part, tensors_of
from loaders.common.limits import LimitError, cpus_per_rank, limits_explained, torch_threads
from loaders.common.loader import DataInfo, Loader
