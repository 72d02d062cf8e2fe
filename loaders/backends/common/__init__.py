"""What backends share: loading on the CPU, and the way from their images to batches."""

from loaders.backends.common.dataset import PlanDataset, movable
from loaders.backends.common.loader import ImageLoader
from loaders.backends.common.transform import Batch, RawBatch
from loaders.backends.common.workers import MIN_ROWS, default_workers, with_fastest_parallelism
