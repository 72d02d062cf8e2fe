"""The plan: what happens to which sample in which epoch. Synthetic batches show its rows."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from loaders import Loader
from loaders.order import Order
from tests.helpers import refused
from tests.images import loaders_of, photos_in, save, smooth

CROPPED = ["data.crop=[24,20]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]


def rows_of(loader: Loader, epoch: int = 0) -> np.ndarray:
    """The rows of an epoch."""
    loader.set_epoch(epoch)
    return np.concatenate([loader.last_rows.copy() for _ in loader])


def digits(*overrides: str) -> Loader:
    """The training loader of 10,000 images of 28x28 pixels."""
    return loaders_of("loader=synthetic", "global_batch_size=500", *overrides)[0]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Overrides that read 17 images of 300x400 pixels, and 7 that validate."""
    root = tmp_path_factory.mktemp("photos") / "photos"
    for number in range(24):
        save(root / "ab"[number % 2] / f"{number}.jpg", smooth(number, 300, 400))
    return photos_in(root, "loader=synthetic", "data.val_count=7", "data.crop=[8,8]")


def split_of(root: Path, *sizes: tuple[int, int]) -> list[str]:
    """Overrides that read an image of each size (height, width), to train and to validate."""
    for split in ("train", "val"):
        for number, size in enumerate(sizes):
            save(root / split / "ab"[number] / "1.png", np.zeros((*size, 3), np.uint8))
    return photos_in(root, "loader=synthetic", f"global_batch_size={len(sizes)}")


def test_seed_and_epoch_decide_the_rows_whose_columns_are_uniform_and_independent() -> None:
    """Crops of 24x20 of 28x28 pixels reach each of 5 x 9 offsets."""
    rows = rows_of(digits(*CROPPED))
    assert np.array_equal(rows, rows_of(digits(*CROPPED)))
    for others in (rows_of(digits(*CROPPED), epoch=1), rows_of(digits(*CROPPED, "seed=1"))):
        for column in ("sample", "y", "x", "hflip"):
            assert not np.array_equal(rows[column], others[column])
    assert {*rows["height"]} | {*rows["width"]} == {24, 20}
    columns = {"y": 5, "x": 9, "hflip": 2, "vflip": 2}
    for (one, num), (other, num_others) in combinations(columns.items(), 2):
        both = rows[one].astype(int) * num_others + rows[other]
        assert_alike_often(both, num * num_others)


def assert_alike_often(values: np.ndarray, num_values: int) -> None:
    """As often as by chance, not more alike either: 5 standard deviations have 6e-7."""
    p = chisquare(np.bincount(values, minlength=num_values)).pvalue
    assert 1e-6 < p < 1 - 1e-6


def test_a_shuffled_order_keeps_nothing_of_positions_neighbours_or_other_epochs() -> None:
    """All are within 5 standard deviations of chance, as NumPy's permutations are."""
    for number in (1, 2, 3, 10, 97, 4096):
        assert sorted(Order().shuffled(np.arange(number), number, 0, 0)) == [*range(number)]
    # All 120 orders of five samples are alike often.
    orders = [Order().shuffled(np.arange(5), 5, 0, epoch) for epoch in range(2400)]
    _, codes = np.unique(orders, axis=0, return_inverse=True)
    assert_alike_often(codes, 120)
    loader, count = digits(), 10_000
    first, second = (rows_of(loader, epoch)["sample"] for epoch in range(2))
    assert sorted(first) == [*range(count)]
    for one, other in [(first, np.arange(count)), (first[:-1], first[1:]), (first, second)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(count)
    # Of each tenth of the samples, as many in each tenth of the epoch.
    table = np.histogram2d(first, np.arange(count), bins=10)[0]
    assert abs(table - count / 100).max() < 5 * math.sqrt(count / 100)
    assert (np.diff(first) == 1).sum() < 10  # 1 is expected


def test_evaluation_reads_resized_centre_crops_in_order_and_flips_none(tmp_path: Path) -> None:
    """The shorter side of 500x375 becomes 256: 224 of 256 are 328 of 375 pixels."""
    options = [*split_of(tmp_path / "d", (375, 500), (500, 375)), "data.hflip=1", "data.vflip=1"]
    for resize, crop, expected in (
        ("256", "[224,224]", [(0, 23, 86, 328, 328, 0, 0), (1, 86, 23, 328, 328, 0, 0)]),
        ("[250,250]", "null", [(0, 0, 0, 375, 500, 0, 0), (1, 0, 0, 500, 375, 0, 0)]),
    ):
        val = loaders_of(*options, f"data.resize={resize}", f"data.crop={crop}")[1]
        columns = ["sample", "y", "x", "height", "width", "hflip", "vflip"]
        assert rows_of(val)[columns].tolist() == expected


def test_random_resized_crops_have_the_configured_area_and_ratio(photos, tmp_path: Path) -> None:
    loader = loaders_of(*photos, "data.random_resized_crop=[0.25,1.0]", "global_batch_size=17")[0]
    rows = np.concatenate([rows_of(loader, epoch) for epoch in range(300)])
    share, ratio = rows["height"] * rows["width"] / (300 * 400), rows["width"] / rows["height"]
    assert 0.24 < share.min() < 0.26
    assert share.max() > 0.9
    assert 0.74 < ratio.min() < ratio.max() < 1.35
    assert (rows["y"] + rows["height"] <= 300).all()
    narrow = split_of(tmp_path / "d", (10, 1000), (10, 1000))
    crop = ["data.crop=[8,8]", "data.random_resized_crop=[0.9,1.0]"]
    assert {*rows_of(loaders_of(*narrow, *crop)[0])[["height", "width"]].tolist()} == {(10, 10)}


def test_what_gives_no_whole_batch_is_refused(photos: list[str], tmp_path: Path) -> None:
    with refused("[8, 8]", "[9, 9]", "data.crop"):
        loaders_of(*split_of(tmp_path / "one", (8, 8), (9, 9)), "data.crop=null")
    with refused("8x20", "9x9"):
        loaders_of(*split_of(tmp_path / "two", (8, 20), (9, 9)), "data.crop=[9,9]")
    assert len(loaders_of(*photos, "global_batch_size=17")[0]) == 1
    assert len(loaders_of(*photos, "global_batch_size=7", world_size=7)[1]) == 1
    with refused("photos/val", "7 samples", "world_size=8"):
        loaders_of(*photos, "global_batch_size=8", world_size=8)


def test_after_a_resume_with_larger_batches_all_are_full_and_each_pass_goes_on(photos) -> None:
    """From row 4, one batch of six is left of a pass of 17 samples, in epochs of nine steps."""
    sizes = (4, 6, 6)
    options = [[*photos, "epoch_steps=9", f"global_batch_size={size}"] for size in sizes]
    first, then, other = (loaders_of(*each)[0] for each in options)
    next(iter(first))
    for loader in (then, other):
        loader.load_state_dict(first.state_dict())
    batches = [then.last_rows.copy() for _ in then]
    assert [len(batch) for batch in batches] == [6] * 8
    first_pass = [row["position"] for batch in batches for row in batch if row["pass"] == 0]
    assert first_pass == [*range(4, 10)]
    for batch in batches:  # one after another, as training reads them, they are the same
        next(iter(other))
        assert np.array_equal(other.last_rows, batch)
