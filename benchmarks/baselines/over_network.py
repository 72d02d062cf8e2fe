"""Other libraries that read shards from a server, with the settings that their docs recommend.

Each function takes the bucket folder of the server, the server's address, and a job, whose folder
is for local copies. All apply the same transforms with torchvision in worker processes, which
return uint8; whole batches are converted to float32. LitData and mosaicml-streaming download whole
shards and read them from the folder; WebDataset streams them.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchcodec.decoders import decode_image
from torchvision.transforms import v2

from benchmarks.baselines import Job, litdata_chunks, optional
from benchmarks.baselines.dataloader import convert, geometry
from benchmarks.baselines.webdataset_shards import SHUFFLE_BUFFER

SHARD_BYTES = 1 << 26
"""Shard size that mosaicml-streaming and LitData recommend."""


def webdataset(bucket: Path, address: str, job: Job) -> Iterator[tuple[Tensor]]:
    """Tar files in `shards/train`, streamed by curl and shuffled in a buffer only."""
    wds = optional("webdataset", "webdataset")
    names = sorted(path.name for path in (bucket / "shards" / "train").glob("*.tar"))
    urls = [f"{address}/{bucket.name}/shards/train/{name}" for name in names]
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=0, empty_check=False)
    dataset = dataset.shuffle(SHUFFLE_BUFFER).to_tuple("jpg").map_tuple(_Decode(job))
    loader: Any = wds.WebLoader(
        dataset.batched(job.batch_size, partial=False), batch_size=None, num_workers=job.parallel
    )
    return _converted(loader.map(itemgetter(0)), job)


def litdata(bucket: Path, address: str, job: Job) -> Iterator[tuple[Tensor]]:
    """LitData chunks in `litdata`."""
    package = optional("litdata", "litdata")
    downloader = importlib.import_module("litdata.streaming.downloader")
    # Its fast downloader refuses http otherwise.
    getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = True
    dataset = package.StreamingDataset(
        f"s3://{bucket.name}/litdata",
        cache_dir=str(job.folder),
        shuffle=True,
        drop_last=True,
        seed=0,
        storage_options={"endpoint_url": address},
        transform=v2.Compose(geometry(job.recipe, v2)),
    )
    loader = package.StreamingDataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.parallel
    )
    return _converted(loader, job)


def mosaicml(bucket: Path, address: str, job: Job) -> Iterator[tuple[Tensor]]:
    """MDS shards in `mosaicml`."""
    os.environ["S3_ENDPOINT_URL"] = address
    dataset = optional("streaming", "mosaicml-streaming").StreamingDataset(
        remote=f"s3://{bucket.name}/mosaicml",
        local=str(job.folder),
        shuffle=True,
        batch_size=job.batch_size,
    )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        job.batch_size,
        collate_fn=partial(_decode_all, _Decode(job)),
        num_workers=job.parallel,
        drop_last=True,
    )
    return _converted(loader, job)


def prepare(files: list[str], bucket: Path) -> None:
    """Write missing chunks and shards of the libraries that are installed."""
    with suppress(ModuleNotFoundError):  # reported by its rows
        litdata_chunks.prepare(files, bucket.absolute() / "litdata", 1)
    with suppress(ModuleNotFoundError):
        writes = optional("streaming", "mosaicml-streaming").MDSWriter
        if not (bucket / "mosaicml" / "index.json").exists():
            out, columns = str(bucket / "mosaicml"), {"jpg": "bytes"}
            with writes(out=out, columns=columns, size_limit=SHARD_BYTES) as writer:
                for file in files:
                    writer.write({"jpg": Path(file).read_bytes()})


class _Decode:
    """Picklable transform from JPEG bytes to a cropped uint8 image."""

    def __init__(self, job: Job) -> None:
        self.steps = v2.Compose([v2.Identity(), *geometry(job.recipe, v2)])

    def __call__(self, jpeg: bytes) -> Tensor:
        return self.steps(decode_image(jpeg))


def _decode_all(decode: _Decode, samples: list[dict[str, bytes]]) -> Tensor:
    return torch.stack([decode(sample["jpg"]) for sample in samples])


def _converted(loader: Iterable[Tensor], job: Job) -> Iterator[tuple[Tensor]]:
    """Batches as float32, epoch after epoch."""
    to_float = convert(job.recipe)
    while True:
        for images in loader:
            yield (to_float(images),)
