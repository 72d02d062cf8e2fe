"""Images by torch's `DataLoader`: threads of this process, or of each worker process, read them."""

from conf.schema import Config
from loaders.dataset import ImageDataset
from loaders.index import share
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.transform import ImageTransform
from loaders.workers import data_loader, default_workers


def pytorch_loader(plan: Plan, transform: ImageTransform, cfg: Config) -> Loader:
    """Build the loader of a plan."""
    options, device, index = cfg.loader, transform.device, transform.index
    num_workers = options.num_workers
    if num_workers is None:
        # Pixels in memory need none.
        num_samples = 0 if index.form == "pixels" else plan.num_rows
        num_workers = default_workers(device, num_samples, options.num_threads)
    if num_workers:
        share(index, cfg.data)
    num_threads = options.num_threads or max(1, cpus_per_rank() // max(1, num_workers))
    dataset = ImageDataset(transform.rectangles, num_threads)
    batches = data_loader(dataset, plan, num_workers, cfg, device)
    return Loader(
        *(plan, batches, transform, transform.info(plan), device),
        num_threads=cpus_per_rank(),
        num_ahead=0 if num_workers else options.prefetch_factor,
    )
