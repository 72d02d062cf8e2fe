"""WebDataset: the same files in tar archives, decoded by PIL in worker processes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision import transforms

from benchmarks.baselines import Recipe, optional
from benchmarks.baselines.pil_imagefolder import geometry, to_normalised_tensor

NUM_SHARDS = 8
SHUFFLE_BUFFER = 1000


def prepare(files: Sequence[str], folder: Path) -> list[str]:
    """Paths of the archives, which are written if they are not there."""
    wds = optional("webdataset", "webdataset")
    shards = [str(folder / f"{number:03d}.tar") for number in range(NUM_SHARDS)]
    finished = folder / "finished"
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        per_shard = -(-len(files) // NUM_SHARDS)
        for number, shard in enumerate(shards):
            with wds.TarWriter(shard) as writer:
                start = number * per_shard
                for sample, path in enumerate(files[start : start + per_shard], start):
                    content = Path(path).read_bytes()
                    writer.write({"__key__": f"{sample:08d}", "jpg": content})
        finished.touch()
    return shards


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_workers: int = 0,
    seed: int = 0,
    folder: Path = Path("data/bench/webdataset"),
) -> Iterable[Tensor]:
    """JPEGs. Shuffled by shards and in a buffer only; each worker has shards and batches of its own,
    the last of them smaller.

    Args:
        folder: where the archives are, or are written to.
    """
    wds = optional("webdataset", "webdataset")
    transform = transforms.Compose([*geometry(recipe), *to_normalised_tensor(recipe)])
    dataset = wds.WebDataset(
        prepare(files, folder),
        shardshuffle=NUM_SHARDS if recipe.train else False,
        seed=seed,
        empty_check=False,
    )
    if recipe.train:
        dataset = dataset.shuffle(SHUFFLE_BUFFER)
    dataset = dataset.decode("pilrgb").to_tuple("jpg").map_tuple(transform)
    dataset = dataset.batched(batch_size)
    loader: Any = wds.WebLoader(
        dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    return loader.map(_first)


def _first(batch: tuple[Tensor, ...]) -> Tensor:
    return batch[0]
