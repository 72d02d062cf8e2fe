"""The plan: what happens to which sample in which epoch."""

import numpy as np
import pytest

from loaders.index import Index, Labels
from loaders.plan import epoch_plan, output_size
from loaders.sampler import PlanSampler
from tests.helpers import make_config


def make_index(*sizes: tuple[int, int]) -> Index:
    return Index(
        name="made/train",
        sizes=np.array(sizes),
        channels=3,
        target=Labels(np.zeros(len(sizes), int), ("all",)),
    )


def make_plan(index: Index, *overrides: str, epoch: int = 0, train: bool = True, seed: int = 0):
    return epoch_plan(index, make_config(*overrides).data, seed, epoch, train)


def test_same_seed_and_epoch_give_the_same_plan_and_others_another() -> None:
    index = make_index(*[(40, 50)] * 100)
    options = ["data.crop=[32,32]", "data.random_crop=true", "data.hflip=0.5"]
    plan = make_plan(index, *options)
    assert np.array_equal(plan, make_plan(index, *options))
    assert sorted(plan["sample"]) == list(range(100))
    for other in (make_plan(index, *options, epoch=1), make_plan(index, *options, seed=1)):
        for column in ("sample", "y", "x", "hflip"):
            assert not np.array_equal(plan[column], other[column])


def test_switching_one_augmentation_on_leaves_the_other_columns_alone() -> None:
    index = make_index(*[(40, 50)] * 100)
    plain = make_plan(index, "data.crop=[32,32]", "data.random_crop=true")
    flipped = make_plan(index, "data.crop=[32,32]", "data.random_crop=true", "data.hflip=0.5")
    assert 20 < flipped["hflip"].sum() < 80
    for column in ("sample", "y", "x", "height", "width"):
        assert np.array_equal(plain[column], flipped[column])


def test_random_crops_reach_every_offset_alike() -> None:
    plan = make_plan(make_index(*[(10, 12)] * 9000), "data.crop=[8,8]", "data.random_crop=true")
    assert (plan["height"] == 8).all()
    assert (plan["width"] == 8).all()
    assert np.bincount(plan["y"]) == pytest.approx([3000] * 3, rel=0.1)
    assert np.bincount(plan["x"]) == pytest.approx([1800] * 5, rel=0.1)


def test_resize_and_centre_crop_is_a_rectangle_of_the_source() -> None:
    # The shorter side of 500x375 becomes 256: 224 of 256 are 328 of 375 pixels.
    index = make_index((375, 500), (500, 375))
    plan = make_plan(index, "data.resize=256", "data.crop=[224,224]", train=False)
    assert plan["height"].tolist() == plan["width"].tolist() == [328, 328]
    assert plan["y"].tolist() == [23, 86]
    assert plan["x"].tolist() == [86, 23]
    exact = make_plan(index, "data.resize=[250,250]", train=False)
    assert exact[["y", "x", "height", "width"]].tolist() == [(0, 0, 375, 500), (0, 0, 500, 375)]


def test_random_resized_crops_have_the_configured_area_and_ratio() -> None:
    index = make_index(*[(300, 400)] * 5000)
    plan = make_plan(index, "data.crop=[224,224]", "data.random_resized_crop=[0.25,1.0]")
    share = plan["height"] * plan["width"] / (300 * 400)
    ratio = plan["width"] / plan["height"]
    assert 0.24 < share.min() < 0.26
    assert share.max() > 0.9
    assert 0.74 < ratio.min() < ratio.max() < 1.35
    assert (plan["y"] + plan["height"] <= 300).all()
    assert (plan["x"] + plan["width"] <= 400).all()
    narrow = make_plan(
        make_index((10, 1000)), "data.crop=[8,8]", "data.random_resized_crop=[0.9,1.0]"
    )
    assert narrow[["height", "width"]].tolist() == [(10, 10)]


def test_colour_factors_stay_in_their_range_and_evaluation_is_untouched() -> None:
    index = make_index(*[(8, 8)] * 1000)
    jitter = ["data.colour_jitter=[0.4,0,0.2]", "data.hflip=1", "data.vflip=1"]
    plan = make_plan(index, *jitter)
    assert 0.6 <= plan["brightness"].min() < 0.65
    assert 1.35 < plan["brightness"].max() <= 1.4
    assert (plan["contrast"] == 1).all()
    assert 0.8 <= plan["saturation"].min() < plan["saturation"].max() <= 1.2
    assert plan["hflip"].all()
    assert plan["vflip"].all()
    still = make_plan(index, *jitter, train=False)
    assert still["sample"].tolist() == list(range(1000))
    assert not still["hflip"].any()
    assert not still["vflip"].any()
    assert (still["brightness"] == 1).all()


def test_an_open_output_size_and_a_crop_that_is_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different sizes, from \[8, 8\] to \[9, 9\].*data.crop"):
        output_size(make_config().data, make_index((8, 8), (9, 9)))
    with pytest.raises(ValueError, match=r"1 of 2 images .* one is 8x20 but data.crop needs 9x9"):
        make_plan(make_index((8, 20), (9, 9)), "data.crop=[9,9]")


def rows_of_all_ranks(index: Index, epoch: int, batch: int, world_size: int, train: bool):
    data = make_config().data
    batches = []
    for rank in range(world_size):
        sampler = PlanSampler(index, data, 0, batch, rank, world_size, train)
        sampler.set_epoch(epoch)
        batches.append([rows["sample"].tolist() for rows in sampler])
        assert len(sampler) == len(batches[-1])
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_interleave_to_the_order_of_one_process(world_size: int) -> None:
    index = make_index(*[(8, 8)] * 13)
    whole = rows_of_all_ranks(index, 0, 6, 1, train=True)[0]
    parts = rows_of_all_ranks(index, 0, 6, world_size, train=True)
    for number, batch in enumerate(whole):
        for rank in range(world_size):
            assert parts[rank][number] == batch[rank::world_size]


def test_a_split_smaller_than_a_batch_or_the_ranks_is_refused() -> None:
    index = make_index(*[(8, 8)] * 5)
    data = make_config().data
    with pytest.raises(
        ValueError, match="made/train has 5 samples, fewer than global_batch_size=6"
    ):
        PlanSampler(index, data, 0, 6, 0, 1, train=True)
    with pytest.raises(ValueError, match="made/train has 5 samples, fewer than world_size=6"):
        PlanSampler(index, data, 0, 6, 0, 6, train=False)
