"""What every backend promises for every kind of data. A further one is a line in its table."""

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from loaders import Loader, build_loaders
from loaders.check import check
from loaders.index import BadFileError, Index
from loaders.targets import Labels, MultiLabels
from tests.helpers import make_config
from tests.images import (
    NUM_TRAIN,
    NUM_VAL,
    RESIZED_CROPS,
    TURNED,
    Data,
    common,
    index_in,
    paths_in,
)
from tests.kinds import ARCHIVED, COPIES, OTHERS
from tests.kinds import KINDS as FOLDERS

BATCH = 4
KINDS: dict[str, Callable[[Path], Data]] = {**FOLDERS, **ARCHIVED}
"""Name of a kind of data -> function that writes it."""
# One kind of each layout and form of files.
FORMS = ["photos", "cells of 8 bits, not compressed", "cells of 16 bits", "masks", "pairs"]
FORMS += ["photos that DALI reads", "cells that DALI reads"]
FORMS = [kind for kind in FORMS if kind in KINDS]
# name of a way to read data -> the overrides that choose it
WAYS: dict[str, list[str]] = {
    "threads": ["loader=pytorch", "loader.num_threads=2"],
    "workers": ["loader=pytorch", "loader.num_workers=2"],
}
# Ways that are not tested with all kinds of data.
KINDS_OF = {"workers": ["photos"]}
# Of the other kinds, some files are refused.
KINDS_OF["dali"] = [
    *("photos that DALI reads", "cells that DALI reads", "cells of 8 bits, not compressed"),
    *("cells of one channel", "pairs", "pairs, targets twice as large"),
    *("several labels", "numbers"),
]
KINDS_OF |= {way: [*FOLDERS] for way in COPIES}
FORMS = [*FORMS, *ARCHIVED]
WAYS |= OTHERS | COPIES
CASES = [(kind, way) for way in WAYS for kind in KINDS if kind in KINDS_OF.get(way, KINDS)]
CROPS = ["data.crop=[24,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]


class Sample(NamedTuple):
    name: str
    row: np.void
    inputs: Tensor
    target: Tensor


class Place:
    """A kind of data in a folder, its loaders and, by split, the names of its files."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.root = folder, folder / "data"
        self.data = KINDS[kind](self.root)
        self.epochs: dict[tuple[object, ...], list[Sample]] = {}
        self.names = {
            index_in(loader).name: [Path(file).name for file in paths_in(index_in(loader))]
            for loader in self.loaders("threads")
        }

    def loaders(self, way: str, *more: str, rank=0, num_ranks=1) -> tuple[Loader, Loader]:
        options = (*self.data.options, *CROPS, *common(self.root), *WAYS[way])
        out = self.folder / f"pack {' '.join(more)}".replace("=", " ")
        options += (f"loader.pack='{out}'",) * (way in COPIES)
        cfg = make_config(*options, f"global_batch_size={BATCH}", *more)
        if way in COPIES:
            import_module("loaders.pack").pack(cfg.data, out)
        return build_loaders(cfg, torch.device("cpu"), rank, num_ranks)

    def read(self, loader: Loader, epoch: int | None = 0) -> list[Sample]:
        """The samples of an epoch."""
        loader.set_epoch(epoch or 0)
        names, found = self.names[index_in(loader).name], []
        for batch in loader:
            rows = loader.last_rows
            in_order = [names[sample] for sample in rows["sample"]]
            found += [Sample(*one) for one in zip(in_order, rows, *batch, strict=True)]
        return found

    def epoch(self, way: str, epoch: int | None, *more: str) -> list[Sample]:
        """An epoch of training, or (None) the validation, by one process."""
        if (way, epoch, *more) not in self.epochs:
            loader = self.loaders(way, *more)[epoch is None]
            self.epochs[way, epoch, *more] = self.read(loader, epoch)
        return self.epochs[way, epoch, *more]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Callable[[str], Place]:
    return functools.cache(lambda kind: Place(kind, tmp_path_factory.mktemp("kind")))


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


def cut_out(image: np.ndarray, row: np.void, factor: int = 1) -> Tensor:
    """The rectangle of a row of the plan, flipped, as (C, H, W), or (H, W) of a mask."""
    y, x, height, width = (factor * int(row[key]) for key in ("y", "x", "height", "width"))
    image = image[y : y + height, x : x + width]
    image = image[::-1] if row["vflip"] else image
    image = image[:, ::-1] if row["hflip"] else image
    return torch.from_numpy((image if image.ndim == 2 else np.moveaxis(image, -1, 0)).copy())


def expected_target(loader: Loader, target: Any, row: np.void) -> Tensor:
    if isinstance(target, np.ndarray):
        return cut_out(target, row, max(side.size_factor for side in index_in(loader).sides))
    if isinstance(loader.info.target, Labels):
        return torch.tensor(loader.info.classes.index(target))
    if isinstance(loader.info.target, MultiLabels):
        names = target.replace(" ", "").split(";")
        return torch.tensor([float(name in names) for name in loader.info.classes])
    return torch.tensor([float(target)])


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
    assert (len(train), train.max_batches, train.info.num_dropped) == (5, 5, 2)
    assert (len(val), val.max_batches, val.info.num_dropped) == (2, 2, 0)
    orders = []
    for loader, epoch in ((train, 0), (train, 1), (val, None)):
        samples = place.epochs[way, epoch] = place.read(loader, epoch)
        orders.append(names(samples))
        for name, row, *found in samples:
            target = expected_target(loader, place.data.targets[name], row)
            expected = [cut_out(place.data.inputs[name], row), target]
            atol = 4.01 / 255 if name.endswith("jpg") else 1e-5
            torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=name)
        assert orders[-1] == names(place.epoch("threads", epoch))
    for order, count in zip(orders, (20, 20, NUM_VAL), strict=True):
        assert len(order) == len(set(order)) == count
    assert orders[0] != orders[1]
    assert not set(orders[0]) & set(orders[2])
    assert [len(inputs) for inputs, _ in val] == [4, 3]


CONTINUED: list[Any] = [(*case, []) for case in CASES if case[0] in FORMS and case[1] != "workers"]
CONTINUED += [
    (kind, way, [*TURNED, "data.mixup=0.4"]) for kind, way in CASES if kind.startswith("photos")
]


@pytest.mark.parametrize(("kind", "way", "more"), CONTINUED)
def test_an_epoch_continues_at_any_row_on_any_ranks(kind, way, more, places) -> None:
    """And on a copy of its files, with other batches unless samples are mixed in them."""
    place = places(kind)
    source = places(place.data.copy_of or kind)
    batch = BATCH if more else 6
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
    whole = place.epoch(way, 1, *more)
    assert_same(merged(parts), whole[8 : 8 + left * batch])
    assert_same(merged(validated), place.epoch(way, None, *more))  # 4 and 3 of 7


BAD_CASES = [(kind, way) for kind, way in CASES if kind in FORMS and way not in COPIES]
BAD_CASES = [case for case in BAD_CASES if case[1] != "workers" or case[0] in FOLDERS]


@pytest.mark.parametrize(("kind", "way"), BAD_CASES)
def test_a_bad_sample_is_named(kind: str, way: str, places, tmp_path: Path) -> None:
    ours = Place(kind, tmp_path)
    for loader in ours.loaders(way):
        for sample in (2, 3, 4):  # two are not in the epoch
            ours.data.spoil(index_in(loader), sample)
        with pytest.raises(BadFileError, match=str(ours.root)):
            ours.read(loader)


@pytest.mark.parametrize(("kind", "way"), [case for case in BAD_CASES if case[1] != "dali"])
def test_a_bad_sample_is_replaced_by_the_next_one(kind, way, places, tmp_path: Path) -> None:
    """Of the index, at the same position; evaluation leaves it out. Two are in succession, one is
    the last; photos have two ranks."""
    place, ours, num_ranks = places(kind), Place(kind, tmp_path), 2 if kind == "photos" else 1
    rank, batch = num_ranks - 1, BATCH // num_ranks
    skip = ["data.on_error=skip"]
    (train, val), (late, _) = (
        ours.loaders(way, *skip, rank=rank, num_ranks=num_ranks) for _ in range(2)
    )
    bad, bad_val = [3, 4, NUM_TRAIN - 1], [1]  # not one whose end has no pixels
    for loader, samples in ((train, bad), (val, bad_val)):
        for sample in samples:
            ours.data.spoil(index_in(loader), sample)
    in_index = ours.names[index_in(train).name]
    bad_names = {in_index[sample] for sample in bad}
    whole = place.epoch(way, 0)[rank::num_ranks]
    found = ours.read(train)
    for before, (name, row, *values) in zip(whole, found, strict=True):
        expected = in_index.index(before.name)
        while in_index[expected] in bad_names:
            expected = following(index_in(train), expected)
        assert name == in_index[expected]
        assert row["position"] == before.row["position"]
        if name == before.name:
            assert row == before.row
        target = expected_target(train, ours.data.targets[name], row)
        atol = 4.01 / 255 if name.endswith("jpg") else 1e-5
        right = [cut_out(ours.data.inputs[name], row), target]
        torch.testing.assert_close(values, right, rtol=0, atol=atol, msg=name)
    late.load_state_dict(train.state_at(0, False) | {"row": 2 * BATCH})
    assert_same(ours.read(late), found[2 * batch :])
    val_names = names(place.epoch(way, None)[rank::num_ranks])
    left_out = ours.names[index_in(val).name][1]
    assert names(ours.read(val)) == [name for name in val_names if name != left_out]
    if way == "threads" and "cells" not in kind:  # not every missing byte of a TIFF is used
        problems = check(make_config(*ours.data.options, *common(ours.root)).data)[1]
        assert len(problems) == 4


def following(index: Index, sample: int) -> int:
    """The sample that stands in for a bad one: the next one, or of shards the one before it in the
    shard."""
    return index.source.following(sample, len(index))


# What is resized or augmented: close to `threads` where a backend does it in its own way.

SHOWN: list[tuple[str, list[str]]] = [
    ("photos that DALI reads", ["data.resize=40"]),
    ("photos that DALI reads", RESIZED_CROPS),
    ("photos that DALI reads", [*TURNED, "data.mixup=0.4"]),
    ("cells of 8 bits, not compressed", ["data.resize=[90,100]", "data.crop=80"]),
    ("cells that DALI reads", ["data.resize=[32,40]"]),
    ("masks", ["data.resize=[88,100]", "data.crop=null"]),
    ("masks", RESIZED_CROPS),
    ("masks", TURNED),
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


ENLARGED = [
    ("cells of 8 bits, not compressed", (90, 96), 0.01),
    ("masks", (120, 168), 0),
    ("several labels", (21, 22), 1),
]


@pytest.mark.parametrize(
    ("kind", "size", "tolerance"), [row for row in ENLARGED if row[0] in KINDS]
)
def test_a_resized_image_lies_where_the_image_does(kind: str, size, tolerance, places) -> None:
    """Within `tolerance` / 255 of `torch.nn.functional.interpolate`; a mask is 3 times as large."""
    place = places(kind)
    options = (f"data.resize=[{size[0]},{size[1]}]", "data.crop=null")
    for name, _, inputs, target in place.epoch("threads", None, *options):
        if target.ndim == 2:  # a mask
            stored = place.data.targets[name]
            if stored.shape[0] == 40:
                assert np.array_equal(target, stored.repeat(3, axis=0).repeat(3, axis=1))
            continue
        source = torch.from_numpy(place.data.inputs[name]).permute(2, 0, 1)[None]
        expected = interpolate(source, size, mode="bilinear", antialias=size < source.shape[2:])
        assert (inputs - expected[0]).abs().mean() <= tolerance / 255


@pytest.mark.parametrize("kind", [kind for kind in FOLDERS if "cells" not in kind])
def test_synthetic_batches_have_the_shapes_and_the_order_of_real_ones(kind: str, places) -> None:
    place = places(kind)
    both = (place.loaders("threads", *more) for more in ((), ("loader=synthetic",)))
    for split in zip(*both, strict=True):
        for one, other in zip(*map(place.read, split), strict=True):
            assert one.name == other.name
            for tensor, same in zip(one[2:], other[2:], strict=True):
                assert (tensor.shape, tensor.dtype) == (same.shape, same.dtype)
