"""What backends share: worker processes, and the way from images to batches."""

from loaders.backends.common.loader import ImageLoader
from loaders.backends.common.shared import SharedBatches
from loaders.backends.common.transform import Batch, RawBatch
from loaders.backends.common.workers import default_workers, with_fastest_parallelism
