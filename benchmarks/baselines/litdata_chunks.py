"""LitData: the same JPEGs in its chunks, decoded by torchvision in worker processes."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision.transforms import v2

from benchmarks.baselines import Recipe, optional
from benchmarks.baselines.torchvision_v2 import convert, geometry


def as_jpeg(path: str) -> Any:
    """The file's bytes as they are, which LitData decodes into a uint8 tensor (C, H, W)."""
    from PIL import Image

    return Image.open(path)


def prepare(files: Sequence[str], folder: Path, num_workers: int) -> Path:
    """The folder with the chunks, which are written if they are not there."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        optional("litdata", "litdata").optimize(
            as_jpeg,
            inputs=list(files),
            output_dir=str(unfinished),
            chunk_bytes="64MB",
            num_workers=num_workers,
            reorder_files=False,
            keep_data_ordered=True,
            verbose=False,
        )
        unfinished.rename(folder)
    return folder


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_workers: int = 0,
    seed: int = 0,
    folder: Path = Path("data/bench/litdata"),
) -> Iterable[Tensor]:
    """JPEGs.

    Args:
        folder: where the chunks are, or are written to.
    """
    litdata = optional("litdata", "litdata")
    dataset = litdata.StreamingDataset(
        str(prepare(files, folder.absolute(), max(1, num_workers))),
        shuffle=recipe.train,
        drop_last=recipe.train,
        seed=seed,
        transform=v2.Compose([*geometry(recipe), convert(recipe)]),
    )
    loader: Any = litdata.StreamingDataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    return loader
