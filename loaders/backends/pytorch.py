"""Images by torch's `DataLoader`: threads of this process, or of each worker process, read them."""

from collections.abc import Iterable

import torch

from conf.schema import Config
from loaders.batch import Batch
from loaders.columns import stored
from loaders.dataset import ImageDataset
from loaders.limits import cpus_per_rank
from loaders.loader import Ahead, Loader
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.transform import ImageTransform
from loaders.workers import data_loader, default_workers


def pytorch_loader(plan: Plan, cfg: Config, device: torch.device) -> Loader:
    """Build the loader of a plan of `Rectangles`."""
    rectangles = plan.samples
    assert isinstance(rectangles, Rectangles)
    transform = ImageTransform(rectangles, cfg, device)
    num_workers, num_threads = cfg.loader.num_workers, cfg.loader.num_threads
    if num_workers is None:
        # Pixels in memory need none.
        num_samples = 0 if rectangles.index.source.form == "pixels" else plan.num_rows
        num_workers = default_workers(device, num_samples, num_threads)
    if num_workers:
        rectangles.index = stored(rectangles.index, cfg.data)
    num_threads = num_threads or max(1, cpus_per_rank() // max(1, num_workers))
    dataset = ImageDataset(rectangles, num_threads)
    ahead, pins = cfg.loader.prefetch_factor, device.type == "cuda"
    batches: Iterable[Batch] = data_loader(dataset, plan, num_workers, ahead, pins)
    if not num_workers:
        batches = Ahead(batches, ahead)
    return Loader(plan, batches, transform, transform.info(plan), device, cpus_per_rank())
