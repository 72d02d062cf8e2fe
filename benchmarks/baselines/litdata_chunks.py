"""LitData: JPEGs in chunks, decoded by worker processes."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import litdata
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.baselines import Job
from benchmarks.baselines.dataloader import convert, geometry


def prepare(files: list[str], folder: Path, num_workers: int) -> Path:
    """Folder of the chunks, which are written if missing."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        litdata.optimize(
            Image.open,  # LitData stores the file's bytes unchanged
            inputs=files,
            output_dir=str(unfinished),
            chunk_bytes="64MB",
            num_workers=num_workers,
            reorder_files=False,
            keep_data_ordered=True,
            verbose=False,
        )
        unfinished.rename(folder)
    return folder


def batches(job: Job) -> Iterable[Tensor]:
    dataset = litdata.StreamingDataset(
        str(prepare(job.files, job.folder.absolute(), max(1, job.parallel))),
        shuffle=job.recipe.train,
        drop_last=job.recipe.train,
        seed=0,
        transform=v2.Compose([*geometry(job.recipe, v2), convert(job.recipe)]),
    )
    loader: Any = litdata.StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.parallel,
        persistent_workers=job.parallel > 0,
        pin_memory=job.on_gpu,
    )
    return loader
