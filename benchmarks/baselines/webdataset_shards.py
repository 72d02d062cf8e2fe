"""WebDataset: files in tar archives, decoded by PIL in worker processes."""

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import webdataset as wds
from torch import Tensor
from torchvision import transforms

from benchmarks.baselines import Job
from benchmarks.baselines.dataloader import geometry, to_tensor

NUM_SHARDS = 8
SHUFFLE_BUFFER = 1000


def prepare(files: list[str], folder: Path) -> list[str]:
    """Paths of the archives, which are written if missing."""
    shards = [str(folder / f"{number:03d}.tar") for number in range(NUM_SHARDS)]
    finished = folder / "finished"
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        per_shard = -(-len(files) // NUM_SHARDS)
        for number, shard in enumerate(shards):
            with wds.TarWriter(shard) as writer:
                start = number * per_shard
                for sample, path in enumerate(files[start : start + per_shard], start):
                    writer.write({"__key__": f"{sample:08d}", "jpg": Path(path).read_bytes()})
        finished.touch()
    return shards


def batches(job: Job) -> Iterable[Tensor]:
    """JPEGs, shuffled by shards and in a buffer only.

    Each worker reads its own shards and builds its own batches, the last of which is smaller.
    """
    dataset = wds.WebDataset(
        prepare(job.files, job.folder),
        shardshuffle=NUM_SHARDS if job.recipe.train else False,
        seed=0,
        empty_check=False,
    )
    if job.recipe.train:
        dataset = dataset.shuffle(SHUFFLE_BUFFER)
    steps = [*geometry(job.recipe, transforms), *to_tensor(job.recipe)]
    dataset = dataset.decode("pilrgb").to_tuple("jpg").map_tuple(transforms.Compose(steps))
    loader: Any = wds.WebLoader(
        dataset.batched(job.batch_size),
        batch_size=None,
        num_workers=job.parallel,
        persistent_workers=job.parallel > 0,
        pin_memory=job.on_gpu,
    )
    return loader.map(itemgetter(0))
