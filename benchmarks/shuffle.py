"""How random the order of an epoch is that goes through shards, beside a shuffle buffer of the same memory.

No images are read: of shards that hold 100 classes, mixed (as `loaders.pack` writes them) or one class behind
another, what comes into the batches of an epoch is counted. The buffer, as WebDataset has it, takes samples
of shuffled shards one by one, and hands out a random one of those that it holds; a window has as many.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from loaders.index import Index, ShardFiles, Shards
from loaders.plan import PlanSampler
from loaders.targets import Labels

NUM_SHARDS, SHARD_SIZE, NUM_CLASSES, WINDOW, BATCH_SIZE = 100, 500, 100, 8, 256
COUNT = NUM_SHARDS * SHARD_SIZE
ORIGINS, CLASSES, MOVED = "shards in a batch", "classes in a batch", "mean displacement"
CASES = {"classes mixed in the shards": True, "one class after another": False}


def main(run: Run) -> None:
    samples = np.arange(COUNT)
    starts = np.arange(0, COUNT + 1, SHARD_SIZE)
    index = Index(
        name="shards/train",
        sizes=np.broadcast_to(np.array([28, 28], np.int32), (COUNT, 2)),
        channels=1,
        target=Labels(samples, tuple(map(str, range(NUM_CLASSES)))),
        shards=Shards(ShardFiles(Path(), ()), "", (), samples, starts),
    )
    orders: dict[Subject, Callable[[int], np.ndarray]] = {
        Subject("data.shuffle=full"): partial(in_plan, index, ["data.shuffle=full"]),
        **{
            Subject("data.shuffle=window", settings=f"{window} of {NUM_SHARDS} shards"): partial(
                in_plan, index, ["data.shuffle=window", f"data.shuffle_window={window}"]
            )
            for window in (1, WINDOW, 4 * WINDOW)
        },
        Subject("shuffle buffer", settings=f"{WINDOW * SHARD_SIZE} samples"): through_buffer,
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
    """What the batches of an epoch hold.

    The displacement is that between the position of a sample and the one that it would have if the samples
    came shard by shard, in the order of the epoch's shards; as a share of the epoch.
    """
    whole = len(order) // BATCH_SIZE * BATCH_SIZE
    shard_of = order // SHARD_SIZE
    _, first = np.unique(shard_of, return_index=True)
    turn_of = np.argsort(np.argsort(first))  # the order in which the shards appear
    unmixed = turn_of[shard_of] * SHARD_SIZE + order % SHARD_SIZE
    found = {
        (MOVED, "% of the epoch"): 100 * np.abs(unmixed - np.arange(len(order))).mean() / len(order)
    }
    for name, values in ((CLASSES, classes[order]), (ORIGINS, shard_of)):
        batches = values[:whole].reshape(-1, BATCH_SIZE)
        found[name, "of 100"] = float(np.mean([len(np.unique(batch)) for batch in batches]))
    return found


def in_plan(index: Index, overrides: list[str], epoch: int) -> np.ndarray:
    """Samples of an epoch with these overrides, in its order."""
    sampler = PlanSampler(index, make_config(*overrides).data, 0, BATCH_SIZE, 0, 1, train=True)
    sampler.set_epoch(epoch)
    return sampler.plan(np.arange(COUNT))["sample"]


def through_buffer(epoch: int) -> np.ndarray:
    """The order in which a buffer, once it is full, hands out the samples of shuffled shards."""
    random = np.random.default_rng(epoch)
    shards = random.permutation(NUM_SHARDS)
    coming = (shards[:, None] * SHARD_SIZE + np.arange(SHARD_SIZE)).ravel()
    held, order = list(coming[: WINDOW * SHARD_SIZE]), []
    for sample in coming[WINDOW * SHARD_SIZE :]:
        place = random.integers(len(held))
        order.append(held[place])
        held[place] = sample
    return np.array(order + [held[place] for place in random.permutation(len(held))])
