"""Ordinary Datasets and own loaders are as exact as images: any workers, any ranks, from any batch on."""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import v2
from torchvision.tv_tensors import KeyPoints

from conf.errors import UserError
from loaders import Loader, build_loaders
from loaders.batch import num_samples, part, tensors_of
from loaders.epoch import EpochLoader
from loaders.own import OWN
from tests.helpers import (
    DEVICES,
    REPOSITORY,
    folder_with,
    make_config,
    scalars_of,
    summary_of,
    train,
)

CPU = torch.device("cpu")
BAD = {3, 20}


class Photos(Dataset):
    """What a user writes: random numbers of three libraries, no thought of seeds."""

    def __init__(self, count: int, bad: frozenset[int] = frozenset()) -> None:
        self.count, self.bad = count, bad
        steps = [v2.RandomResizedCrop(32, antialias=True), v2.RandAugment()]
        self.transform = v2.Compose(steps)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[dict[str, Any], tuple[int, str]]:
        if number in self.bad:
            raise ValueError("it is broken")
        pixels = torch.arange(3 * 48 * 48).mul(number + 7).remainder(251)
        image = self.transform(pixels.to(torch.uint8).view(3, 48, 48)).float()
        image = image + float(np.random.normal()) + random.random() + torch.rand(1)
        return {"image": image, "moved": (image[0, 0], number)}, (number, f"name {number}")


def photos(data: Any) -> tuple[Dataset, Dataset]:
    return Photos(64), Photos(13)


def broken_photos(data: Any) -> tuple[Dataset, Dataset]:
    return Photos(64, frozenset(BAD)), Photos(13, frozenset(BAD))


def mixed(data: Any) -> tuple[Dataset, Dataset]:
    """One sample has another shape than the others."""
    items = [(torch.zeros(2 + (number == 40)), number) for number in range(64)]
    return Items(items), Items(items)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "photos", photos)
    monkeypatch.setitem(OWN, "broken_photos", broken_photos)
    monkeypatch.setitem(OWN, "mixed", mixed)


def loaders_of(*overrides: str, rank: int = 0, world_size: int = 1, device: str = "cpu") -> Any:
    options = ["data=own", "data.name=photos", "global_batch_size=8", "seed=1", *overrides]
    return build_loaders(make_config(*options), torch.device(device), rank, world_size)


def items_of(loader: Any, epoch: int = 3) -> list[dict[int, Tensor]]:
    """Of each batch, the images by sample."""
    loader.set_epoch(epoch)
    batches = []
    for inputs, (numbers, names) in loader:
        assert names == [f"name {number}" for number in numbers.tolist()]
        assert torch.equal(inputs["moved"][0], inputs["image"][:, 0, 0])
        batches.append(dict(zip(numbers.tolist(), inputs["image"].cpu(), strict=True)))
    return batches


def are_equal(one: list[dict[int, Tensor]], other: list[dict[int, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def whole() -> list[dict[int, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OWN, "photos", photos)
        return items_of(loaders_of()[0])


def test_an_epoch_has_each_sample_once_and_the_next_one_has_others(whole: Any) -> None:
    assert sorted(number for batch in whole for number in batch) == list(range(64))
    next_ones = items_of(loaders_of()[0], 4)
    assert [batch.keys() for batch in next_ones] != [batch.keys() for batch in whole]
    images, next_images = ({k: v for b in e for k, v in b.items()} for e in (whole, next_ones))
    assert not any(torch.equal(images[number], next_images[number]) for number in images)
    train_loader, val_loader = loaders_of()
    train_loader.set_epoch(3)
    assert are_equal(items_of(val_loader), items_of(val_loader))  # the same in each validation


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_workers_ranks_and_a_resume_change_no_bit(num_workers: int, whole: Any) -> None:
    options = [f"loader.num_workers={num_workers}"]
    if num_workers:
        assert are_equal(items_of(loaders_of(*options)[0]), whole)
    ranks = [loaders_of(*options, rank=rank, world_size=2)[0] for rank in range(2)]
    ranks[0].set_epoch(3)
    for _ in zip(range(5), ranks[0], strict=False):
        pass
    state = ranks[0].state_dict()
    assert ranks[0].batches_done == 5
    for loader in ranks:
        loader.load_state_dict(state)
    halves = [items_of(loader) for loader in ranks]
    assert are_equal([a | b for a, b in zip(*halves, strict=True)], whole[5:])


def test_the_training_processs_own_generators_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def seeded() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seeded()
    expected = draw()
    seeded()
    train_loader, _ = loaders_of()
    next(iter(train_loader))
    assert draw() == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_replaced_or_left_out_as_bad_files(num_workers: int) -> None:
    options = ["data.name=broken_photos", f"loader.num_workers={num_workers}"]
    with pytest.raises(UserError, match=r"sample \d+ .*it is broken"):
        for _ in range(2):
            items_of(loaders_of(*options)[0])
    options += ["data.on_error=skip"]
    for world_size in (1, 2):
        train_loaders = [
            loaders_of(*options, rank=r, world_size=world_size)[0] for r in range(world_size)
        ]
        numbers = [n for loader in train_loaders for batch in items_of(loader) for n in batch]
        assert not BAD & set(numbers)
        states = [loader.state_dict()["bad"][0] for loader in train_loaders]
        assert set().union(*states) == BAD
    val_loader = loaders_of(*options)[1]
    assert [n for batch in items_of(val_loader) for n in batch] == [n for n in range(13) if n != 3]
    with pytest.raises(UserError, match="max_bad_samples=1"):
        items_of(loaders_of(*options, "data.max_bad_samples=1")[0])


class Pair(NamedTuple):
    left: Any
    right: Any


def test_any_nesting_of_a_batch_is_counted_and_split() -> None:
    batch = {"text": ["a", "b", "c"], "pair": Pair(torch.arange(3), torch.zeros(3, 2)), "rate": 0.5}
    assert num_samples(batch) == num_samples((torch.tensor(1.0), batch)) == 3
    last = part(batch, 1, 3)
    assert last["text"] == ["b", "c"]
    assert isinstance(last["pair"], Pair)
    assert last["pair"].left.tolist() == [1, 2]
    assert last["rate"] == 0.5
    assert [tensor.shape[0] for tensor in tensors_of(last)] == [2, 2]
    assert num_samples({"rate": 0.5}) == 0


class Items(Dataset):
    """A Dataset of a list; its `collate_fn` is a function of the list's items."""

    def __init__(self, items: list[Any], collate_fn: Any = None) -> None:
        self.items = items
        if collate_fn is not None:
            self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def loader_of(monkeypatch: pytest.MonkeyPatch, items: list[Any], *overrides: str) -> Any:
    monkeypatch.setitem(OWN, "items", lambda data: (Items(items), Items(items)))
    return loaders_of("data.name=items", *overrides)[1]


def test_numbers_texts_and_tuples_of_any_kind_make_a_batch(monkeypatch: Any) -> None:
    texts = ["a", b"b", np.str_("c")]
    pair = Pair(np.float32(2), (np.arange(2), *texts))
    inputs = {"pair": pair, "points": KeyPoints(torch.ones(3, 2), canvas_size=(4, 4))}
    loader = loader_of(monkeypatch, [(inputs, np.int64(number)) for number in range(9)])
    [batch, last] = loader
    assert batch[1].tolist() == list(range(8))
    assert last[1].tolist() == [8]
    left, (array, *columns) = batch[0]["pair"]
    assert isinstance(batch[0]["pair"], Pair)
    assert left.tolist() == [2] * 8
    assert array.shape == (8, 2)
    assert columns == [[text] * 8 for text in texts]
    assert batch[0]["points"].shape == (8, 3, 2)
    assert part(batch, 6, 8)[0]["pair"].right[1] == ["a", "a"]


@dataclass
class Sample:
    image: Tensor


IMAGE = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([], "0 samples"),
        ([(IMAGE, 0)] * 4, "4 samples"),
        ([(IMAGE, Sample(IMAGE))] * 9, "Sample"),
        ([(IMAGE, None)] * 9, "NoneType"),
        ([(IMAGE, 0, 1)] * 9, "tuple"),
        ([{"image": IMAGE}] * 9, "dict"),
        ([(IMAGE, 0)] * 5 + [(IMAGE[:1], 0)] * 4, r"float32 \(1, 8, 8\)"),
        ([({"a": IMAGE}, 0)] * 5 + [({"b": IMAGE}, 0)] * 4, "'b'"),
        ([(IMAGE, (0, 1))] * 5 + [(IMAGE, (0,))] * 4, "sample"),
        ([("text", {1})] * 9, "set"),
    ],
)
def test_samples_that_make_no_batch_are_refused(items: Any, named: str, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=named):
        list(loader_of(monkeypatch, items))


def test_what_a_collate_fn_raises_or_returns_is_told(monkeypatch: Any) -> None:
    def broken(items: list[Any]) -> Any:
        raise KeyError("mask")

    for function, named in ((broken, "mask"), (lambda items: (IMAGE, Sample(IMAGE)), "Sample")):
        data = Items([(IMAGE, 0)] * 9, function)
        monkeypatch.setitem(OWN, "items", lambda cfg, data=data: (data, data))
        with pytest.raises(UserError, match=named):
            list(loaders_of("data.name=items")[0])


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        yield IMAGE, 0


@pytest.mark.parametrize(
    "returned", [Items([(IMAGE, 0)] * 9), (Items([]),), [1, 2], (Streamed(), Streamed()), None]
)
def test_a_function_that_returns_something_else_is_refused(returned: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(OWN, "items", lambda data: returned)
    with pytest.raises(UserError, match="data.name=items"):
        loaders_of("data.name=items")


def test_two_workers_tell_of_samples_that_make_no_batch() -> None:
    with pytest.raises(UserError, match="mixed/train.*sample"):
        items_of(loaders_of("data.name=mixed", "loader.num_workers=2")[0])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_any_nesting_come_to_the_device_in_channels_last(device: str) -> None:
    loader, _ = loaders_of("loader.channels_last=true", device=device)
    inputs, (numbers, _) = next(iter(loader))
    assert {tensor.device.type for tensor in tensors_of((inputs, numbers))} == {device}
    assert inputs["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "override",
    ["data.name=digts", "loader.num_workers=auto", "loader=dali", "global_batch_size=65"],
)
def test_mistakes_are_refused(override: str) -> None:
    with pytest.raises(UserError, match=re.escape(override.split("=")[0])):
        loaders_of(override)


OPTIONS = [
    "epochs=1",
    "log.every_steps=1",
    "global_batch_size=16",
    "model.kwargs.batch_norm=false",
]


# part: compose
def test_every_script_trains_on_ordinary_datasets_and_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    options = [*OPTIONS, "data=own", "data.name=digits", "max_steps=12"]
    for script in ("train.py", "train_ddp.py"):
        train(script, tmp_path / script, *options)
    losses = [
        scalars_of(tmp_path / script, "train/loss") for script in ("train.py", "train_ddp.py")
    ]
    assert losses[0] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in losses[1]]
    train("train.py", tmp_path / "parts", *options[:-1], "max_steps=5")
    train("train_ddp.py", tmp_path / "parts", *options, "resume=auto")
    assert scalars_of(tmp_path / "parts", "train/loss")[-1] == (
        *(12, pytest.approx(losses[0][-1][1], abs=1e-4)),
    )
    assert summary_of(tmp_path / "parts")["bad_samples"] == {"train": 0, "val": 0}


def test_a_loader_has_at_most_12_names() -> None:
    names = [n for n in vars(Loader) if not n.startswith("_") or n in ("__iter__", "__len__")]
    assert len(names) <= 12
    assert all(hasattr(EpochLoader, name) for name in names if name != "info")


# part: compose
def test_a_loader_of_ones_own_trains_evaluates_and_goes_on_on_two_ranks(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "own_data.md").read_text().partition("## Data that streams")[2]
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    loader = code.partition("class Stream")[2].partition("\n\n\n")[0]
    assert len([line for line in loader.splitlines() if line]) <= 30
    for script in ("train.py", "train_ddp.py"):
        project = folder_with(tmp_path / f"with-{script}", script)
        (project / "mine").mkdir()
        (project / "mine" / "stream.py").write_text(code)
        text = (project / script).read_text()
        entry = 'from loaders import LOADERS\n\nLOADERS["stream"] = "mine.stream.build_loaders"\n\n\n@hydra'
        (project / script).write_text(text.replace("@hydra", entry, 1))
    options = [*OPTIONS, "data=own", "data.layout=stream"]
    one, two = tmp_path / "with-train.py", tmp_path / "with-train_ddp.py"
    train("train.py", tmp_path / "one", *options, folder=one)
    train("train_ddp.py", tmp_path / "two", *options, folder=two)
    train("train_ddp.py", tmp_path / "parts", *options, "max_steps=5", folder=two)
    train("train_ddp.py", tmp_path / "parts", *options, "resume=auto", folder=two)
    losses = [scalars_of(tmp_path / run, "val/loss")[-1] for run in ("one", "two", "parts")]
    assert losses[1] == losses[2]
    assert losses[0] == (12, pytest.approx(losses[1][1], abs=1e-4))
