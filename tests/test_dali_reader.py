"""DALI's own file reader, `loader=dali_reader`, which shuffles by itself."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.errors import UserError
from loaders.backends import ImageLoader
from loaders.image_loaders import build_loaders
from loaders.index import BadFileError
from tests.helpers import make_config, refused
from tests.images import make_photos, save

PLAIN = ["data.resize=null", "data.mean=null", "data.std=null", "data.val_count=3"]


def train_loader(
    tmp_path: Path, *overrides: str, rank: int = 0, world_size: int = 1
) -> ImageLoader:
    options = ["loader=dali_reader", f"data.cache_dir={tmp_path / 'cache'}"]
    cfg = make_config(*options, *PLAIN, *overrides)
    return build_loaders(cfg, torch.device("cpu"), rank, world_size)[0]


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """19 pairs whose pixels are their row, column and number, increased by 100 in the target."""
    y, x = np.mgrid[:40, :60].astype(np.uint8)
    for number in range(19):
        for side, shift in (("input", 0), ("target", 100)):
            image = np.stack([y, x, np.full_like(x, number + shift)], axis=-1)
            save(tmp_path / "pairs" / side / f"{number:02d}.png", image)
    crop = ["data.crop=[24,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]
    data = ["data=pairs", f"data.root={tmp_path / 'pairs'}", "data.value_range=[0,1]"]
    return [*data, *crop, "global_batch_size=6"]


def drawn(loader: ImageLoader, stop: int = 99) -> list[tuple[int, tuple[int, ...]]]:
    """Number and corner pixels of each sample, which show its rectangle and flips."""
    samples = []
    for _, (inputs, targets) in zip(range(stop), loader, strict=False):
        values = [(255 * images).round().int() for images in (inputs, targets)]
        assert torch.equal(values[0][:, :2], values[1][:, :2])  # one rectangle, flipped alike
        assert torch.equal(values[0][:, 2] + 100, values[1][:, 2])
        for image in values[0]:
            corners = image[:2, [0, -1], [0, -1]].flatten().tolist()
            samples.append((int(image[2, 0, 0]), tuple(corners)))
    return samples


@pytest.mark.parametrize("world_size", [1, 3])
def test_it_repeats_nothing_and_drops_the_tail(world_size: int, pairs, tmp_path) -> None:
    """16 pairs in batches of 6; an epoch that was left early does not leak into the next one."""
    ranks = [
        train_loader(tmp_path, *pairs, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    orders = []
    for epoch in range(4):
        seen = []
        for train in ranks:
            train.set_epoch(epoch)
            samples = drawn(train, 1 if epoch == 2 else 99)
            assert len(samples) == (6 if epoch == 2 else 12) // world_size
            seen += [number for number, _ in samples]
        assert len(set(seen)) == len(seen)
        orders.append(seen)
    assert orders[0] != orders[1] != orders[3]


def test_it_draws_the_same_from_the_same_seed(pairs, tmp_path) -> None:
    first, same, other_seed, other_rank = (
        drawn(train_loader(tmp_path, *pairs, f"seed={seed}", rank=rank, world_size=2))
        for rank, seed in ((1, 3), (1, 3), (1, 4), (0, 3))
    )
    assert first == same
    assert first not in (other_seed, other_rank)


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    root = make_photos(tmp_path / "photos", 16)
    return ["data=imagefolder", f"data.root={root}", "data.crop=[32,32]", "global_batch_size=4"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["data.colour_jitter=[0.1,0,0]"], ["data.colour_jitter"]),
        (["data.rotation=5", "data.mixup=1"], ["data.rotation", "data.mixup"]),
        (["data.on_error=skip"], ["data.on_error=skip"]),
    ],
)
def test_what_it_cannot_do_is_refused(overrides, keys, photos, tmp_path) -> None:
    with refused("loader=dali_reader", *keys):
        train_loader(tmp_path, *photos, *overrides)


def test_it_has_no_position_to_resume_at_and_names_a_file_that_changed(photos, tmp_path) -> None:
    train = train_loader(tmp_path, *photos)
    next(iter(train))
    with pytest.raises(UserError, match="loader=dali_reader"):
        train.load_state_dict(train.state_dict())
    name = train.index.files[0][3]
    os.utime(name, (0, 0))
    with pytest.raises(BadFileError, match=name):
        list(train)
