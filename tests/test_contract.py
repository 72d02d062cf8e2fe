"""What every backend promises for every kind of data. A further one is a line in its table."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import interpolate

from loaders.check import check
from loaders.index import BadFileError
from tests.helpers import make_config
from tests.images import index_in, paths_in
from tests.kinds import (
    COPIES,
    IN_SHARDS,
    KINDS,
    NUM_TRAIN,
    NUM_VAL,
    OTHERS,
    READERS,
    Place,
    Sample,
    common,
)
from tests.processes import workers_of

# Ways that are not tested with all kinds of data. Of the other kinds, DALI refuses some files.
KINDS_OF = {
    "workers": ["photos"],
    "dali": [
        *("photos that DALI reads", "cells that DALI reads", "cells of 8 bits, not compressed"),
        *("cells of one channel", "pairs", "pairs, targets twice as large"),
        *("several labels", "numbers"),
    ],
    **{way: [*KINDS] for way in COPIES},
}
CASES = [
    (kind, way)
    for way in READERS | COPIES
    for kind in KINDS | IN_SHARDS
    if kind in KINDS_OF.get(way, KINDS | IN_SHARDS)
]
# One kind of each layout and form of files.
FORMS = [*IN_SHARDS, "photos", "cells of 8 bits, not compressed", "cells of 16 bits", "masks"]
FORMS += ["pairs", "photos that DALI reads", "cells that DALI reads"]
DESCRIBED = {
    "formats": "9 images may be transparent: data.background=[255, 255, 255]",
    "other formats": "4 images may be transparent: data.background=[10, 200, 70]",
    "cells of 16 bits": "inputs: 24x32, 5 channels of 16 bits, 35.6% of images of 45x48",
    "pairs": "inputs: 24x32, 3 channels, 36.6% of images of 41-43x50",
    "masks": "inputs: 24x32, 3 channels, 31.2% of images of 40-48x56",
}
RESIZED_CROPS = ["data.random_resized_crop=[0.3,1]", "data.random_crop=false"]
TURNED = [
    *("data.rotation=40", "data.random_scale=[0.7,1.4]", "data.random_erasing=0.5"),
    *("data.randaugment=[2,9]", "data.cutmix=1", "data.colour_jitter=[0.3,0.3,0.3]"),
]


def names(samples: list[Sample]) -> list[str]:
    return [sample.name for sample in samples]


def merged(parts: list[list[Sample]]) -> list[Sample]:
    """The samples of all ranks in the order of one process."""
    count = sum(map(len, parts))
    return [parts[n % len(parts)][n // len(parts)] for n in range(count)]


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    assert names(found) == names(expected)
    tensors = ([sample[2:] for sample in samples] for samples in (found, expected))
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_every_sample_is_the_rectangle_of_its_row(kind: str, way: str, places) -> None:
    """And comes once in an epoch, in another order in the next one."""
    place = places(kind)
    train, val = place.loaders(way)
    reference = place.loaders("threads")[0].info
    lines = [line for line in train.info.description if line in reference.description]
    assert lines == [*reference.description]
    assert train.info.classes == reference.classes
    if reference.classes:
        assert np.array_equal(train.info.class_counts(), reference.class_counts())
    assert f"{NUM_TRAIN} training and {NUM_VAL} validation" in reference.description[0]
    assert DESCRIBED.get(kind, "inputs: 24x32") in "\n".join(reference.description)
    assert (len(train), train.max_batches, train.info.num_dropped) == (5, 5, 2)
    assert (len(val), val.max_batches, val.info.num_dropped) == (2, 2, 0)
    orders = []
    for loader, epoch in ((train, 0), (train, 1), (val, None)):
        samples = place.epochs[way, epoch] = place.read(loader, epoch)
        orders.append(names(samples))
        for sample in samples:
            place.assert_right(sample)
        assert orders[-1] == names(place.epoch("threads", epoch))
    for order, count in zip(orders, (20, 20, NUM_VAL), strict=True):
        assert len(order) == len(set(order)) == count
    assert orders[0] != orders[1]
    assert not set(orders[0]) & set(orders[2])
    assert [len(inputs) for inputs, _ in val] == [4, 3]
    if way == "workers":
        processes = workers_of(psutil.Process())
        assert len(processes) >= 2
        assert max(process.memory_full_info().uss for process in processes) < 150e6


CONTINUED: list[Any] = [(*case, []) for case in CASES if case[0] in FORMS and case[1] != "workers"]
CONTINUED += [
    (kind, way, [*TURNED, "data.mixup=0.4"]) for kind, way in CASES if kind.startswith("photos")
]


@pytest.mark.parametrize(("kind", "way", "more"), CONTINUED)
def test_an_epoch_continues_at_any_row_on_any_ranks(kind, way, more, places) -> None:
    """And on a copy of its files, with other batches unless samples are mixed in them."""
    place = places(kind)
    source = places(place.data.copy_of or kind)
    batch = 4 if more else 6
    first = source.loaders(way, *more)[0]
    first.set_epoch(1)
    for _, _ in zip(range(2), first, strict=False):
        state = first.state_dict()
    assert first.batches_done == 2
    # Of the epoch that was left early nothing stays.
    assert_same(source.read(first, 0), place.epoch(way, 0, *more))
    parts, validated = [], []
    for rank in range(2):
        options = [*more, f"global_batch_size={batch}"]
        train, val = place.loaders(way, *options, rank=rank, num_ranks=2)
        train.load_state_dict(state)
        left = train.max_batches - train.batches_done
        assert (train.max_batches, left) == ((3, 1) if batch == 6 else (5, 3))
        parts.append(place.read(train, 1))
        assert train.batches_done == len(train) == train.max_batches
        validated.append(place.read(val))
        assert len(val) == math.ceil(len(validated[-1]) / (batch // 2))
    whole = place.epoch(way, 1, *more)
    assert_same(merged(parts), whole[8 : 8 + left * batch])
    assert_same(merged(validated), place.epoch(way, None, *more))  # 4 and 3 of 7


def spoil(index: Any, sample: int) -> None:
    """Damage one file of a sample, or its bytes in a shard: the target's if it has one."""
    if spans := index.columns.of_sides("spans"):
        shard, start, length, _ = spans[-1][sample].item()
        path = index.copies.path(shard)
        content = bytearray(path.read_bytes())
        content[start + length - 10] ^= 1
    else:
        path = Path(paths_in(index, len(index.sides) - 1)[sample])
        whole = path.read_bytes()
        content = bytearray(whole[: 2 * len(whole) // 3])
        path.unlink()  # it may be mapped into memory
    path.write_bytes(content)


def following(index: Any, sample: int) -> int:
    """The next sample or, of shards, the next one of the same shard; after the last the first."""
    stored = np.arange(len(index))
    if spans := index.columns.of_sides("spans"):
        inside = np.flatnonzero(spans[0]["shard"] == spans[0]["shard"][sample])
        stored = inside[np.argsort(spans[0]["start"][inside])]
    order = stored.tolist()
    return order[(order.index(sample) + 1) % len(order)]


BAD_CASES = [(kind, way) for kind, way in CASES if kind in FORMS and way not in COPIES]


@pytest.mark.parametrize(("kind", "way"), BAD_CASES)
def test_a_bad_sample_is_named_or_replaced_by_the_next_one(kind, way, places, tmp_path) -> None:
    """Of the index or, in shards, of its shard, at the same position; evaluation leaves it out. Two
    are in succession, one is the last; photos have two ranks. DALI replaces none."""
    place, ours, num_ranks = places(kind), Place(kind, tmp_path), 2 if kind == "photos" else 1
    rank, batch = num_ranks - 1, 4 // num_ranks
    named, skip = ours.loaders(way), ["data.on_error=skip"] * (way != "dali")
    (train, val), (late, _) = (
        ours.loaders(way, *skip, rank=rank, num_ranks=num_ranks) for _ in range(2)
    )
    bad, bad_val = [3, 4, NUM_TRAIN - 1], [1]  # not one whose end has no pixels
    for loader, samples in ((train, bad), (val, bad_val)):
        for sample in samples:
            spoil(index_in(loader), sample)
    for loader in named:
        with pytest.raises(BadFileError, match=str(ours.root)):
            ours.read(loader)
    if way == "dali":
        return
    in_index = ours.names[index_in(train).name]
    bad_names = {in_index[sample] for sample in bad}
    whole = place.epoch(way, 0)[rank::num_ranks]
    found = ours.read(train)
    for before, after in zip(whole, found, strict=True):
        expected = in_index.index(before.name)
        while in_index[expected] in bad_names:
            expected = following(index_in(train), expected)
        assert after.name == in_index[expected]
        assert after.row["position"] == before.row["position"]
        if after.name == before.name:
            assert after.row == before.row
        ours.assert_right(after)
    late.load_state_dict(late.state_dict() | {"row": 8})
    assert_same(ours.read(late), found[2 * batch :])
    val_names = names(place.epoch(way, None)[rank::num_ranks])
    left_out = ours.names[index_in(val).name][1]
    assert names(ours.read(val)) == [name for name in val_names if name != left_out]
    if way == "threads" and "cells" not in kind:  # not every missing byte of a TIFF is used
        problems = check(make_config(*ours.data.options, *common(ours.root)).data)[1]
        assert len(problems) == 4


# What is resized or augmented: close to `threads` where a backend does it in its own way.

SHOWN: list[tuple[str, list[str]]] = [
    ("photos that DALI reads", ["data.resize=40"]),
    ("photos that DALI reads", RESIZED_CROPS),
    ("photos that DALI reads", [*TURNED, "data.mixup=0.4"]),
    ("cells of 8 bits, not compressed", ["data.resize=[90,100]", "data.crop=80"]),
    ("cells that DALI reads", ["data.resize=[32,40]"]),
    ("masks", RESIZED_CROPS),
    ("pairs, targets twice as large", ["data.resize=36"]),
]


@pytest.mark.parametrize(
    ("kind", "options", "way"),
    [(*row, way) for row in SHOWN for way in (*OTHERS, *COPIES) if (row[0], way) in CASES],
)
def test_backends_agree_on_what_is_resized_and_augmented(kind, options, way, places) -> None:
    """Within 0.6 of 255 on average. A pack is resized and rounded before it is cut: within 8."""
    place = places(kind)
    is_close = way not in COPIES or "data.resize" not in str(options)
    both = (place.loaders(one, *options) for one in ("threads", way))
    for splits in zip(*both, strict=True):
        read = [place.read(loader) for loader in splits]
        assert names(read[0]) == names(read[1])
        inputs, other_inputs = (torch.stack([s.inputs for s in samples]) for samples in read)
        targets, other_targets = (torch.stack([s.target for s in samples]) for samples in read)
        is_mask, stored = targets.ndim == 3, place.data.targets.values()
        if not is_mask and (is_close or kind.startswith("photos")):  # the rest has hard edges
            assert 255 * (inputs - other_inputs).abs().mean() < (0.6 if is_close else 8)
        if is_mask:
            values = set().union(*(np.unique(mask).tolist() for mask in stored))
            assert set(other_targets.unique().tolist()) == values
            assert (targets == other_targets).float().mean() > (0.999 if is_close else 0.7)
        elif targets.ndim < 3:
            assert torch.equal(targets, other_targets)


@pytest.mark.parametrize(("size", "tolerance"), [((90, 96), 0.01), ((21, 24), 1)])
def test_a_resized_image_lies_where_the_image_does(size, tolerance, places) -> None:
    """Within `tolerance` / 255 of what torch computes of the whole image in float32."""
    place = places("cells of 8 bits, not compressed")
    resized = (f"data.resize=[{size[0]},{size[1]}]", "data.crop=null")
    for name, _, inputs, _ in place.epoch("threads", None, *resized):
        source = torch.from_numpy(place.data.inputs[name]).permute(2, 0, 1)[None]
        expected = interpolate(source, size, mode="bilinear", antialias=size < (45, 48))
        assert (inputs - expected[0]).abs().max() <= tolerance / 255


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "cells" not in kind])
def test_synthetic_batches_have_the_shapes_and_the_order_of_real_ones(kind: str, places) -> None:
    place = places(kind)
    both = (place.loaders("threads", *more) for more in ((), ("loader=synthetic",)))
    for split in zip(*both, strict=True):
        for one, other in zip(*map(place.read, split), strict=True):
            assert one.name == other.name
            for tensor, same in zip(one[2:], other[2:], strict=True):
                assert (tensor.shape, tensor.dtype) == (same.shape, same.dtype)
