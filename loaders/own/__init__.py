"""Your own data, as ordinary map-style Datasets: `data=own data.name=NAME`.

Yours: one file in this folder with a function, and one line in `OWN`. The function takes `cfg.data`
and returns the training and the validation Dataset and, if the task asks for it, the kind of the
targets (`loaders.targets`). An item is `(inputs, targets)`: tensors, numbers, texts, or dicts and
tuples of these. A Dataset may have a `collate_fn`, which makes a batch of a list of items.
"""

import torch

from conf.errors import unknown_name
from conf.schema import Config
from loaders.own.digits import digits
from loaders.own.loader import OwnLoader, Read, make_loaders

OWN: dict[str, Read] = {
    "digits": digits,
}


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[OwnLoader, OwnLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    name = str(cfg.data.name)
    if name not in OWN:
        raise unknown_name("data.name", name, OWN)
    return make_loaders(OWN[name], cfg, device, rank, world_size)


__all__ = ["OWN", "OwnLoader", "build_loaders"]
