"""Randomness of the order of reading samples from shards, compared with a shuffle buffer.

No images are read. Classes and shards in the batches of an epoch are counted, for shards with 100
classes mixed (as `loaders.pack` writes them) or in order. The buffer works as WebDataset's: it
reads shuffled shards in order and returns its samples at random. A window holds as many samples.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from loaders.index import Index, save_columns
from loaders.plan import PlanSampler
from loaders.shards import SPAN, ShardIndex, Shards, Storage
from loaders.targets import Labels

NUM_SHARDS, SHARD_SIZE, NUM_CLASSES, WINDOW, BATCH_SIZE = 100, 500, 100, 8, 256
COUNT = NUM_SHARDS * SHARD_SIZE
ORIGINS, CLASSES, MOVED = "shards in a batch", "classes in a batch", "mean displacement"
CASES = {"classes mixed in the shards": True, "one class after another": False}


def main(run: Run) -> None:
    samples, sizes = np.arange(COUNT), np.full((COUNT, 2), 28, np.int32)
    starts = np.arange(0, COUNT + 1, SHARD_SIZE)
    columns: dict[str, np.ndarray] = {
        "order": samples,
        "starts": starts,
        "spans-0": np.zeros(COUNT, SPAN),
    }
    with TemporaryDirectory() as folder:
        save_columns(Path(folder), columns)
        shards = Shards(Storage(folder, 0), "", Path(folder))
    index = ShardIndex(
        name="shards/train",
        sizes=sizes,
        channels=1,
        target=Labels(samples % NUM_CLASSES, tuple(map(str, range(NUM_CLASSES)))),
        shards=shards,
    )
    orders: dict[Subject, Callable[[int], np.ndarray]] = {
        Subject("data.shuffle=full"): partial(planned_order, index, ["data.shuffle=full"]),
        **{
            Subject("data.shuffle=window", settings=f"{window} of {NUM_SHARDS} shards"): partial(
                planned_order, index, ["data.shuffle=window", f"data.shuffle_window={window}"]
            )
            for window in (1, WINDOW, 4 * WINDOW)
        },
        Subject("shuffle buffer", settings=f"{WINDOW * SHARD_SIZE} samples"): buffered_order,
    }
    for case, is_mixed in CASES.items():
        classes = samples * NUM_CLASSES // COUNT
        if is_mixed:
            classes = np.random.default_rng(0).permutation(classes)
        for subject, order_of in orders.items():
            epochs = [measure(order_of(epoch), classes) for epoch in range(run.sizes.repeats)]
            found = {what: [epoch[what] for epoch in epochs] for what in epochs[0]}
            run.record("shuffle", case, subject, found)


def measure(order: np.ndarray, classes: np.ndarray) -> dict[tuple[str, str], float]:
    """Distinct classes and shards per batch; mean displacement of samples as a share of the epoch.

    The displacement is the distance between the position of a sample in the epoch and its position
    if the shards were read sequentially, in the order of their first appearance.
    """
    whole = len(order) // BATCH_SIZE * BATCH_SIZE
    shard_of = order // SHARD_SIZE
    _, first = np.unique(shard_of, return_index=True)
    rank_of = np.argsort(np.argsort(first))  # rank of each shard by first appearance
    sequential = rank_of[shard_of] * SHARD_SIZE + order % SHARD_SIZE
    found = {
        (MOVED, "% of the epoch"): 100
        * np.abs(sequential - np.arange(len(order))).mean()
        / len(order)
    }
    for name, values in ((CLASSES, classes[order]), (ORIGINS, shard_of)):
        batches = values[:whole].reshape(-1, BATCH_SIZE)
        found[name, "of 100"] = float(np.mean([len(np.unique(batch)) for batch in batches]))
    return found


def planned_order(index: Index, overrides: list[str], epoch: int) -> np.ndarray:
    """Sample numbers of an epoch in the order of the plan with these overrides."""
    cfg = make_config(*overrides, f"global_batch_size={BATCH_SIZE}")
    sampler = PlanSampler(index, cfg, 0, 1, train=True)
    sampler.epoch = epoch
    return sampler.plan(np.arange(COUNT))["sample"]


def buffered_order(epoch: int) -> np.ndarray:
    """Sample numbers in the order in which a full shuffle buffer returns shuffled shards."""
    random = np.random.default_rng(epoch)
    shards = random.permutation(NUM_SHARDS)
    incoming = (shards[:, None] * SHARD_SIZE + np.arange(SHARD_SIZE)).ravel()
    buffer, order = list(incoming[: WINDOW * SHARD_SIZE]), []
    for sample in incoming[WINDOW * SHARD_SIZE :]:
        place = random.integers(len(buffer))
        order.append(buffer[place])
        buffer[place] = sample
    return np.array(order + [buffer[place] for place in random.permutation(len(buffer))])
