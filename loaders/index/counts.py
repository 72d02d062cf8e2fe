"""Numbers of samples of each class, for `loss.weights=auto`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from conf.errors import UserError
from loaders.common import cpus_per_rank
from loaders.index.index import Index
from loaders.index.read import read_image


def class_counts(index: Index) -> np.ndarray:
    """Count the samples, or pixels of masks, of each class, (K,) float64. It reads all masks.

    Raises:
        UserError: the targets have no classes.
    """
    target: Any = index.target
    index.check(slice(None))
    if target.kind not in ("labels", "several labels", "masks"):
        raise UserError(f"the targets of {index.name} are {target.kind}, which have no classes")
    num_classes = len(target.classes)
    if target.kind == "labels":
        return np.bincount(target.values, minlength=num_classes).astype(float)
    if target.kind == "several labels":
        return target.values.sum(axis=0, dtype=float)

    def count(sample: int) -> np.ndarray:
        indices = read_image(index, sample, 1).ravel()
        return np.bincount(indices[indices != target.ignore_index], minlength=num_classes)

    with ThreadPoolExecutor(cpus_per_rank()) as pool:
        return sum(pool.map(count, index.storage_order), np.zeros(num_classes))
