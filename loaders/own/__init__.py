"""Your own data, as ordinary map-style Datasets: `data=own data.name=NAME`.

Yours: one file in this folder with a function, and one line in `OWN`. The function takes `cfg.data`
and returns the training and the validation Dataset and, if the task asks for it, the kind of the
targets (`loaders.targets`). An item is `(inputs, targets)`: tensors, numbers, texts, or dicts and
tuples of these. A Dataset may have a `collate_fn`, which makes a batch of a list of items.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from conf.errors import UserError, unknown_name
from conf.schema import Config, DataConfig
from loaders.epoch import EpochSampler
from loaders.limits import limits_explained
from loaders.own.digits import digits
from loaders.own.loader import OwnLoader

OWN: dict[str, Callable[[DataConfig], tuple]] = {
    "digits": digits,
}


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[OwnLoader, OwnLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    name = str(cfg.data.name)
    if name not in OWN:
        raise unknown_name("data.name", name, OWN)
    if cfg.loader.name != "pytorch" or cfg.loader.num_workers == "auto":
        raise UserError(
            f"loader.name={cfg.loader.name} loader.num_workers={cfg.loader.num_workers} is for "
            "images; with data=own use loader=pytorch and a number of workers"
        )
    with limits_explained():
        datasets = OWN[name](cfg.data)
    if not isinstance(datasets, tuple) or len(datasets) not in (2, 3):
        raise UserError(
            f"the function of data.name={name} returned {type(datasets).__name__}; return "
            "(train, val) or (train, val, kind of the targets)"
        )
    train, val, target = (*datasets, None)[:3]
    for data in (train, val):
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise UserError(
                f"data.name={name}: {type(data).__name__} has no __getitem__ and __len__; for data "
                "that streams, write a loader (docs/own_data.md)"
            )
    samplers = [
        EpochSampler(f"{name}/{split}", len(data), cfg, rank, world_size, split == "train")
        for split, data in (("train", train), ("val", val))
    ]
    train_loader = OwnLoader(train, target, samplers[0], cfg, device)
    val_loader = OwnLoader(val, target, samplers[1], cfg, device)
    train_loader.samplers = samplers  # part: bad_samples
    line = f"{name}: {len(train):,} training and {len(val):,} validation samples"
    line += f", {target.describe()}" if target else ""
    lines = (line, *train_loader.info.description)
    train_loader.info = replace(train_loader.info, description=lines)
    return train_loader, val_loader
