"""Batches for training and evaluation, of any data.

train_loader, val_loader = build_loaders(cfg, device)
"""

from importlib import import_module

import torch

from conf.errors import UserError
from conf.names import find
from conf.schema import Config
from loaders.backends import image_loader
from loaders.index import SPLITS
from loaders.layouts import open_index
from loaders.loader import DataInfo, Loader


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1, held_out: str = "val"
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of this rank; see `Loader` for what they yield.
    With `held_out="test"`, the test split takes the place of the validation.

    Args:
        cfg: `cfg.data`, `cfg.loader`, `cfg.global_batch_size`, `cfg.epoch_steps` and `cfg.seed` are
            used.
        device: device of the batches.
        rank: global rank of this process.
        world_size: number of ranks.

    Raises:
        UserError: the data or the split is missing, or a value of the configuration does not fit.
    """
    place, splits = (device, rank, world_size), ("train", held_out)
    layout = find("loaders.layouts", cfg.data.layout, "data.layout")
    if isinstance(layout, type):
        train, val = (layout(cfg, split, *place) for split in splits)  # loaders of its own
    else:
        if cfg.loader.name == "packed":
            indexes = import_module("loaders.pack").open_pack(cfg)
        else:
            indexes = open_index(cfg.data, {*SPLITS, held_out})
        if held_out not in indexes:
            raise UserError(
                f"data={cfg.data.layout} data.root={cfg.data.root} has no split={held_out}, as a "
                "pack or shards, or it chose the best epoch, as there is no val; use split=val, or "
                "the files of a test split"
            )
        train, val = (
            image_loader(cfg, indexes[split], *place, train=split == "train") for split in splits
        )
    train.info.num_val_samples = val.info.num_samples
    if isinstance(train, Loader):
        info, name = train.info, train.plan.samples.name.rpartition("/")[0]
        counts = f"{info.num_samples:,} training and {info.num_val_samples:,} validation samples"
        target = f", {info.target.describe()}" if info.target else ""
        lines = f"{name}: {counts}{target}", *info.description, *val.info.description
        info.description = lines
    return train, val
