"""Images by torch's `DataLoader`: threads of this process, or of each worker process, read them."""

import torch

from conf.schema import Config
from loaders.dataset import ImageDataset
from loaders.index import share
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
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
        share(rectangles.index, cfg.data)
    num_threads = num_threads or max(1, cpus_per_rank() // max(1, num_workers))
    dataset = ImageDataset(rectangles, num_threads)
    ahead = cfg.loader.prefetch_factor
    batches = data_loader(dataset, plan, num_workers, ahead, device.type == "cuda")
    return Loader(
        *(plan, batches, transform, transform.info(plan), device),
        num_threads=cpus_per_rank(),
        num_ahead=0 if num_workers else ahead,
    )
