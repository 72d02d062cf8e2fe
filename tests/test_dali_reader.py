"""DALI's own file reader, `loader=dali_reader`, which shuffles by itself."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.backends import ImageLoader
from loaders.index import BadFileError
from tests.helpers import refused
from tests.images import PLAIN, loaders_of, make_photos, photos_in, reading, save

OPTIONS = [*PLAIN, "data.val_count=3", "data.crop=[24,32]", "global_batch_size=6"]
NEEDS_PLAN = ["data.colour_jitter=[0.1,0,0]", "data.rotation=5", "data.on_error=skip"]


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """19 pairs whose pixels are their row, column and number, increased by 100 in the target."""
    y, x = np.mgrid[:40, :60].astype(np.uint8)
    for number in range(19):
        for side, shift in (("input", 0), ("target", 100)):
            image = np.stack([y, x, np.full_like(x, number + shift)], axis=-1)
            save(tmp_path / "pairs" / side / f"{number:02d}.png", image)
    data = ["data=pairs", *reading(tmp_path / "pairs"), "data.value_range=[0,1]"]
    crops = ["data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]
    return [*data, *OPTIONS, *crops, "loader=dali_reader"]


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
def test_it_repeats_nothing_and_drops_the_tail(world_size: int, pairs: list[str]) -> None:
    """16 training pairs in batches of 6; of an epoch that was left early, nothing stays."""
    ranks = [loaders_of(*pairs, rank=r, world_size=world_size)[0] for r in range(world_size)]
    epochs = []
    for epoch in range(4):
        seen = []
        for train in ranks:
            train.set_epoch(epoch)
            samples = drawn(train, 1 if epoch == 2 else 99)
            assert len(samples) == (6 if epoch == 2 else 12) // world_size
            seen += samples
        assert len({number for number, _ in seen}) == len(seen)
        epochs.append(seen)
    assert epochs[0] != epochs[1] != epochs[3]
    same, other = (
        drawn(loaders_of(*pairs, f"seed={seed}", world_size=world_size)[0]) for seed in (0, 1)
    )
    assert same == epochs[0][: len(same)] != other


def test_what_needs_the_plan_is_refused_and_a_file_that_changed_is_named(tmp_path: Path) -> None:
    photos = photos_in(make_photos(tmp_path / "photos", 16), "loader=dali_reader", *OPTIONS)
    with refused("loader=dali_reader", *(override.partition("=")[0] for override in NEEDS_PLAN)):
        loaders_of(*photos, *NEEDS_PLAN)
    train, _ = loaders_of(*photos)
    next(iter(train))
    with refused("loader=dali_reader"):  # it has no position to resume at
        train.load_state_dict(train.state_dict())
    name = train.index.files[0][3]
    os.utime(name, (0, 0))
    with pytest.raises(BadFileError, match=name):
        list(train)
