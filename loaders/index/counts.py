"""Numbers of samples of each class, for `loss.weights=auto`."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from conf.errors import UserError
from loaders.common import cpus_per_rank
from loaders.index.index import Index
from loaders.targets import Masks


def class_counts(index: Index) -> np.ndarray:
    """Count the samples, or pixels of masks, of each class, (K,) float64. It reads all masks.

    Raises:
        UserError: the targets have no classes.
    """
    target = index.target
    if not isinstance(target, Masks):
        if (counts := target.class_counts()) is None:
            raise UserError(f"the targets of {index.name} are {target.kind}, which have no classes")
        return counts
    num_classes = len(target.classes)

    def count(sample: int) -> np.ndarray:
        indices = index.read_image(sample, 1).ravel()
        return np.bincount(indices[indices != target.ignore_index], minlength=num_classes)

    with ThreadPoolExecutor(cpus_per_rank()) as pool:
        return sum(pool.map(count, index.storage_order), np.zeros(num_classes))
