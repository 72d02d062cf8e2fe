"""Batches for training and evaluation, from any data set, through any backend.

    train_loader, val_loader = build_loaders(cfg, device)

A layout (`layouts/`) finds the samples, the plan (`plan.py`, `augment.py`) decides what happens to
which of them in an epoch, and a backend (`pytorch.py`, `dali.py`, `synthetic.py`) executes the rows of
the plan. So all backends visit the same samples in the same order with the same augmentation.
"""

import copy
import importlib

import torch

from conf.schema import Config
from loaders.index import Index
from loaders.layouts import build_index
from loaders.layouts.unlabelled import unlabelled
from loaders.limits import limits_explained
from loaders.loader import Loader
from loaders.packed import open_pack
from loaders.sampler import PlanSampler
from loaders.targets import Target
from loaders.tune import with_fastest_parallelism

# name of the backend -> its class; a backend is imported only when it is asked for
BACKENDS = {
    "pytorch": "loaders.pytorch.PyTorchLoader",
    "dali": "loaders.dali.DALILoader",
    "dali native": "loaders.dali_native.NativeDALILoader",
    "packed": "loaders.pytorch.PyTorchLoader",
    "synthetic": "loaders.synthetic.SyntheticLoader",
}


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Training and validation loader of this rank; see `loaders.loader.Loader` for what they yield.

    Args:
        cfg: `cfg.data`, `cfg.loader`, `cfg.global_batch_size` and `cfg.seed` are used.
        device: where the batches shall lie.
        rank: global rank, which is the shard that is read.
        world_size: number of shards.

    Raises:
        ValueError: a value of the configuration does not fit the data or the number of ranks.
        FileNotFoundError: the data is not there.
        LimitError: the machine has no more file handles; the message names the setting to change.
        ModuleNotFoundError: the backend's package is not installed.
    """
    if cfg.global_batch_size % world_size:
        below = cfg.global_batch_size // world_size * world_size
        nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise ValueError(
            f"global_batch_size={cfg.global_batch_size} is not divisible by "
            f"world_size={world_size}; use {nearest}"
        )
    val_backend = train_backend = _backend(cfg.loader.name)
    if cfg.loader.name == "dali" and cfg.loader.reader == "native":
        train_backend = _backend("dali native")
    with limits_explained():
        indexes = open_pack(cfg) if cfg.loader.name == "packed" else build_index(cfg.data)
    train_index, val_index = indexes
    shards = cfg.global_batch_size, rank, world_size

    def new_train_sampler() -> PlanSampler:
        return PlanSampler(train_index, cfg.data, cfg.seed, *shards, train=True)

    train_sampler = new_train_sampler()
    val_sampler = PlanSampler(val_index, cfg.data, cfg.seed, *shards, train=False)
    if cfg.loader.num_workers == "auto":
        cfg = with_fastest_parallelism(cfg, train_backend, new_train_sampler, device)
    train_loader, val_loader = (
        train_backend(train_sampler, cfg, device),
        val_backend(val_sampler, cfg, device),
    )
    train_loader.samplers = [train_sampler, val_sampler]
    train_loader.description = _describe(train_loader, val_index)
    return train_loader, val_loader


def build_prediction_loader(
    cfg: Config,
    target: Target,
    channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Loader, dict[str, str]]:
    """This rank's images of the folder `data.root`, prepared as those of a validation split.

    Args:
        cfg: of the run that trained the model, with another `data.root`.
        target: that the model was trained on.
        channels: that the model takes.
        device, rank, world_size: as in `build_loaders()`.

    Returns:
        The loader, whose `sampler.bad` will name the files that cannot be decoded; and of the files that
        are not even in its index, by path, why.

    Raises:
        FileNotFoundError, ValueError: there are no images, or not such as the model takes.
    """
    if cfg.loader.name not in BACKENDS or cfg.loader.name == "synthetic":
        raise ValueError(
            f"loader.name={cfg.loader.name} reads no files; use loader=pytorch or loader=dali"
        )
    cfg = copy.deepcopy(cfg)
    cfg.data.on_error = "raise"  # and name those without a header that can be used
    with limits_explained():
        index, broken = unlabelled(cfg.data, target, channels)
    # A file that cannot be decoded is an answer, too.
    cfg.data.on_error, cfg.data.max_bad_samples = "skip", len(index)
    if cfg.loader.num_workers == "auto":
        cfg.loader.num_workers = 0  # there may be less to load than to measure
    shards = cfg.global_batch_size, rank, world_size
    sampler = PlanSampler(index, cfg.data, cfg.seed, *shards, train=False)
    return _backend(cfg.loader.name)(sampler, cfg, device), broken


def _describe(train_loader: Loader, val_index: Index) -> str:
    """`photos: 900 training and 100 validation samples, 3 classes (cat, cow, dog)`."""
    index = train_loader.index
    return (
        f"{index.name.rpartition('/')[0]}: {len(index):,} training and {len(val_index):,} validation "
        f"samples, {index.target.describe()}"
    )


def _backend(name: str) -> type[Loader]:
    module, _, class_name = BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(module), class_name)
