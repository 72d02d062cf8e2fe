"""The plan: what happens to which sample in which epoch."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from loaders.columns import Columns
from loaders.index import Index, Source
from loaders.order import random_permutation, stream_key
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.targets import ImageSpec, Labels
from tests.helpers import make_config, refused

FLIPPED = ["data.crop=[32,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=1"]


def make_index(*sizes: tuple[int, int], times: int = 1) -> Index:
    """An index of images of these sizes, or of `times` images of one size."""
    count = len(sizes) * times
    labels = Labels(np.broadcast_to(np.int64(0), count), ("all",))
    every = np.broadcast_to(np.array(sizes), (count, 2))
    inputs = ImageSpec(3, "uint8")
    columns = Columns(sizes=every, distinct_sizes=np.array(sizes))
    return Index("made/train", labels, inputs, Source(columns), "")


def planned(index: Index, *overrides: str, rank=0, ranks=1, train=True) -> Plan:
    cfg = make_config("global_batch_size=1", *overrides)
    return Plan(Rectangles(index, cfg, ranks, train), cfg, rank, ranks)


def make_plan(index: Index, *overrides: str, epoch=0, train=True) -> np.ndarray:
    return planned(index, *overrides, train=train).rows(np.arange(len(index)), epoch)


def test_same_seed_and_epoch_give_the_same_plan_and_others_another() -> None:
    index = make_index((40, 50), times=100)
    plan = make_plan(index, *FLIPPED)
    assert np.array_equal(plan, make_plan(index, *FLIPPED))
    assert plan["vflip"].all()
    for other in (make_plan(index, *FLIPPED, epoch=1), make_plan(index, *FLIPPED, "seed=1")):
        for column in ("sample", "y", "x", "hflip"):
            assert not np.array_equal(plan[column], other[column])


def test_random_crops_reach_every_offset_alike() -> None:
    index = make_index((10, 12), times=9000)
    plan = make_plan(index, "data.crop=[8,8]", "data.random_crop=true")
    assert {*plan["height"], *plan["width"]} == {8}
    assert np.bincount(plan["y"]) == pytest.approx([3000] * 3, rel=0.1)
    assert np.bincount(plan["x"]) == pytest.approx([1800] * 5, rel=0.1)


def test_evaluation_reads_resized_centre_crops_in_order_and_flips_none() -> None:
    """The shorter side of 500x375 becomes 256: 224 of 256 are 328 of 375 pixels."""
    index, options = make_index((375, 500), (500, 375)), ["data.hflip=1", "data.vflip=1"]
    columns = ["y", "x", "height", "width", "hflip", "vflip"]
    plan = make_plan(index, "data.resize=256", "data.crop=[224,224]", *options, train=False)
    assert plan[columns].tolist() == [(23, 86, 328, 328, 0, 0), (86, 23, 328, 328, 0, 0)]
    exact = make_plan(index, "data.resize=[250,250]", *options, train=False)
    assert exact[columns].tolist() == [(0, 0, 375, 500, 0, 0), (0, 0, 500, 375, 0, 0)]
    assert make_plan(make_index((8, 8), times=9), train=False)["sample"].tolist() == [*range(9)]


def test_random_resized_crops_have_the_configured_area_and_ratio() -> None:
    index = make_index((300, 400), times=5000)
    plan = make_plan(index, "data.crop=[224,224]", "data.random_resized_crop=[0.25,1.0]")
    share = plan["height"] * plan["width"] / (300 * 400)
    ratio = plan["width"] / plan["height"]
    assert 0.24 < share.min() < 0.26
    assert share.max() > 0.9
    assert 0.74 < ratio.min() < ratio.max() < 1.35
    assert (plan["y"] + plan["height"] <= 300).all()
    options = ["data.crop=[8,8]", "data.random_resized_crop=[0.9,1.0]"]
    narrow = make_plan(make_index((10, 1000)), *options)
    assert narrow[["height", "width"]].tolist() == [(10, 10)]


@pytest.mark.parametrize("count", [6, 7, 8, 12, 17])
def test_each_rank_knows_how_many_batches_it_evaluates(count: int) -> None:
    """One may have one less; together they have every sample once."""
    parts: list[np.ndarray] = []
    for rank in range(3):
        index, batch = make_index((8, 8), times=count), "global_batch_size=6"
        plan = planned(index, batch, rank=rank, ranks=3, train=False)
        parts += [*plan]
        assert len(plan) == len([*plan]) == -(-len(range(rank, count, 3)) // 2)
    assert sorted(np.concatenate(parts)["sample"]) == [*range(count)]


def test_what_gives_no_whole_batch_is_refused() -> None:
    with refused("[8, 8]", "[9, 9]", "data.crop"):
        planned(make_index((8, 8), (9, 9)), "data.crop=null")
    with refused("8x20", "9x9"):
        planned(make_index((8, 20), (9, 9)), "data.crop=[9,9]")
    five, options = make_index((8, 8), times=5), ["data.crop=null", "global_batch_size=6"]
    with refused("made/train", "5 samples", "world_size=6"):
        planned(five, *options, ranks=6, train=False)


def permutation(count: int, epoch: int) -> np.ndarray:
    return random_permutation(np.arange(count), count, stream_key("x", epoch))


def test_a_shuffled_order_keeps_nothing_of_positions_neighbours_or_other_epochs() -> None:
    """All are within 5 standard deviations of chance, as NumPy's permutations are."""
    count = 100_003
    for number in (1, 2, 3, 10, 97, 4096, count):
        assert sorted(permutation(number, 0)) == list(range(number))
    first, second = permutation(count, 0), permutation(count, 1)
    for one, other in [(first, np.arange(count)), (first[:-1], first[1:]), (first, second)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(count)
    # Of each tenth of the samples, as many in each tenth of the epoch.
    table = np.histogram2d(first, np.arange(count), bins=10)[0]
    assert abs(table - count / 100).max() < 5 * math.sqrt(count / 100)
    assert (np.diff(first) == 1).sum() < 10  # 1 is expected


def test_rows_of_a_billion_samples_cost_what_the_rows_cost() -> None:
    plan = planned(make_index((40, 50), times=10**9), *FLIPPED)
    tracemalloc.start()
    try:
        places = plan.rows(np.arange(700_000_000, 700_008_192), 0)["sample"]
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert len(set(places.tolist())) == len(places)


def rows_of_run(num_epochs: int, *options: str, resumed_after: int = 0) -> list[Any]:
    """The samples of a run of so many epochs, in their order; resumed after so many steps."""
    index, common = make_index((8, 8), times=17), ["global_batch_size=3", *options]
    plan, found = planned(index, *common), []
    for epoch in range(num_epochs):
        plan.begin(epoch)
        while plan.batches_done < plan.max_batches:
            rows = next(iter(plan))
            plan.advance()
            found += rows[["epoch", "position", "sample"]].tolist()
            if len(found) == 3 * resumed_after:
                other = planned(index, *common)
                other.load_state_dict(plan.state_dict())
                plan = other
    return found


def test_epochs_of_any_number_of_steps_cut_one_sequence_of_passes() -> None:
    """Five batches of three of 17 samples are a pass; each pass drops two."""
    passes = rows_of_run(7)
    assert len(passes) == 7 * 15
    for steps in (1, 5, 7, 35):
        options = f"epoch_steps={steps}"
        assert rows_of_run(35 // steps, options) == passes
        for resumed_after in (3, 5, 8, 20):
            assert rows_of_run(35 // steps, options, resumed_after=resumed_after) == passes
    assert len(planned(make_index((8, 8), times=17), "global_batch_size=3", "epoch_steps=7")) == 7


def test_after_a_resume_with_larger_batches_all_are_full_and_each_pass_goes_on() -> None:
    """From row 4, one batch of six is left of a pass of 17 samples, in epochs of nine steps."""
    index, options = make_index((8, 8), times=17), "epoch_steps=9"
    first, then = (planned(index, f"global_batch_size={size}", options) for size in (4, 6))
    first.advance()
    then.load_state_dict(first.state_dict())
    batches = [*then]
    assert [len(batch) for batch in batches] == [6] * 8
    first_pass = [row for batch in batches for row in batch if row["epoch"] == 0]
    assert [row["position"] for row in first_pass] == [*range(4, 10)]
    for batch in batches:  # one after another, as training reads them, they are the same
        assert np.array_equal(next(iter(then)), batch)
        then.advance()
    assert [*then] == []
