"""Ordinary Datasets and own loaders are as exact as images, for any workers, ranks, first batch."""

import random
import re
import traceback
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import KeyPoints

from conf.cli import explain
from conf.schema import ModelConfig
from loaders import build_loaders
from loaders.batch import tensors_of
from loaders.index import BadFileError
from loaders.own_dataset import OwnData, collate
from loaders.targets import Labels, MultiLabels, RegressionTargets
from models import build_model
from tests.helpers import (
    DEVICES,
    REPOSITORY,
    folder_with,
    make_config,
    refused,
    scalars_of,
    train,
)
from tests.parts import rows_of

BAD = {3, 20}
IMAGE = torch.zeros(3, 8, 8)
Pair = namedtuple("Pair", "left right")


class Items(Dataset):
    """A Dataset of a list."""

    def __init__(self, items: list[Any], collate_fn: Any = collate) -> None:
        self.items, self.collate_fn = items, collate_fn

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Photos(Items):
    """What a user writes: random numbers of three libraries, no thought of seeds."""

    transform = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandAugment()])

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], tuple[int, str]]:
        if self.items[number] is None:
            raise BadFileError("it is broken")
        pixels = torch.arange(3 * 48 * 48).mul(number + 7).remainder(251)
        image = self.transform(pixels.to(torch.uint8).view(3, 48, 48)).float()
        image = image + float(np.random.normal()) + random.random() + torch.rand(1)
        return {"image": image}, (number, f"name {number}")


PHOTOS = Photos([*range(64)]), Photos([*range(13)])
BROKEN = tuple(Photos([None if n in BAD else n for n in range(count)]) for count in (64, 13))


@pytest.fixture
def loaders_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the loaders of what a user's function returns, which is called `digits`."""

    def build(*overrides: str, of: Any = PHOTOS, ranks=(0, 1), device="cpu", target=None) -> Any:
        def digits(data: Any, split: str) -> Any:
            found = dict(zip(("train", "val"), of, strict=True)).get(split)
            return OwnData(found, target, found.collate_fn) if isinstance(found, Items) else found

        monkeypatch.setattr("loaders.own.digits.digits", digits)
        options = ["data=own", "data.name=digits", "global_batch_size=8", "seed=1", *overrides]
        return build_loaders(make_config(*options), torch.device(device), *ranks)

    return build


def items_of(loader: Any, epoch: int = 3) -> list[dict[int, Tensor]]:
    """Of each batch, the images by sample."""
    loader.set_epoch(epoch)
    batches = []
    for inputs, (numbers, names) in loader:
        assert names == [f"name {number}" for number in numbers.tolist()]
        batches.append(dict(zip(numbers.tolist(), inputs["image"], strict=True)))
    return batches


def test_an_epoch_has_each_sample_once_and_the_next_one_has_others(loaders_of: Any) -> None:
    """The generators of the training process are left alone."""

    def states() -> str:
        return str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    train_loader, val_loader = loaders_of()
    before = states()
    epochs = [items_of(train_loader, epoch) for epoch in (3, 4)]
    assert states() == before
    assert [batch.keys() for batch in epochs[0]] != [batch.keys() for batch in epochs[1]]
    first, second = ({k: v for batch in epoch for k, v in batch.items()} for epoch in epochs)
    assert sorted(first) == list(range(64))
    assert not any(torch.equal(first[number], second[number]) for number in first)
    validations = items_of(val_loader), items_of(val_loader)
    torch.testing.assert_close(*validations, rtol=0, atol=0)


def test_workers_ranks_and_a_resume_change_no_bit(loaders_of: Any) -> None:
    ranks = [loaders_of(f"loader.num_workers={2 * n}", ranks=(n, 2))[0] for n in (0, 1)]
    ranks[1].set_epoch(3)
    for _ in zip(range(5), ranks[1], strict=False):
        pass
    state = ranks[1].state_dict()
    assert ranks[1].batches_done == 5
    for loader in ranks:
        loader.load_state_dict(state)
    batches = [a | b for a, b in zip(*map(items_of, ranks), strict=True)]
    whole = items_of(loaders_of()[0])
    torch.testing.assert_close(batches, whole[5:], rtol=0, atol=0)


def test_bad_samples_are_replaced_by_the_next_ones(loaders_of: Any) -> None:
    """Whether the training process finds them (on rank 0) or a worker."""
    skip = "data.on_error=skip"
    ranks = [
        loaders_of(skip, f"loader.num_workers={rank}", of=BROKEN, ranks=(rank, 2))
        for rank in range(2)
    ]
    numbers, val_numbers = (
        [n for loader in loaders for batch in items_of(loader) for n in batch]
        for loaders in zip(*ranks, strict=True)
    )
    assert not BAD & set(numbers)
    assert set().union(*(loader.bad for loader, _ in ranks)) == BAD
    assert sorted(val_numbers) == [n for n in range(13) if n != 3]
    with refused("sample ", "it is broken"):
        items_of(loaders_of("loader.num_workers=1", of=BROKEN)[0])


class Faulty(Items):
    def __getitem__(self, number: int) -> Any:
        items: dict[str, Any] = {}
        return items["no such key"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_keeps_its_traceback(workers: int, loaders_of: Any) -> None:
    faulty = Faulty([0] * 9)
    options = "data.on_error=skip", f"loader.num_workers={workers}"
    with pytest.raises(KeyError, match="no such key") as error:
        list(loaders_of(*options, of=(faulty, faulty))[1])
    shown = "".join(traceback.format_exception(error.value))
    assert 'return items["no such key"]' in shown


@pytest.mark.parametrize("device", DEVICES)
def test_values_of_any_kind_and_nesting_make_a_batch_on_the_device(device, loaders_of: Any) -> None:
    texts = ["a", b"b", np.str_("c")]
    pair = Pair(np.float32(2), (np.arange(2), *texts))
    points = KeyPoints(torch.ones(3, 2), canvas_size=(4, 4))
    items = [({"image": IMAGE, "pair": pair, "points": points}, np.int64(n)) for n in range(9)]
    options = {"of": (Items(items), Items(items)), "device": device}
    [batch, last] = loaders_of("loader.channels_last=true", **options)[1]
    assert {tensor.device.type for tensor in tensors_of(batch)} == {device}
    assert batch[0]["image"].is_contiguous(memory_format=torch.channels_last)
    assert batch[0]["points"].shape == (8, 3, 2)
    assert (batch[1].tolist(), last[1].tolist()) == ([*range(8)], [8])
    assert isinstance(batch[0]["pair"], Pair)
    assert isinstance(batch[0]["pair"].right, tuple)
    left, (array, *columns) = batch[0]["pair"]
    assert left.tolist() == [2] * 8
    assert array.shape == (8, 2)
    assert columns == [[text] * 8 for text in texts]


def labelled(label: Any) -> Items:
    """Samples with a label 3, and one with another."""
    return Items([(IMAGE, label if number == 5 else type(label)(3)) for number in range(9)])


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (Items([(IMAGE, None)] * 9), ["NoneType"]),
        (Items([(IMAGE, 0, 1)] * 9), ["tuple"]),
        (Items([(IMAGE, 0)] * 5 + [(IMAGE[:1], 0)] * 4), ["float32 (1, 8, 8)"]),
        (Items([(IMAGE, 0)] * 9, lambda items: {"image": 0}["mask"]), ["mask"]),
        (Items([(np.ones(3), 0)] * 9), ["are float64", "float32"]),
        (labelled(-1), ["digits/val", "sample 5", "from 0 to 9"]),
        (labelled(10), ["digits/val", "sample 5", "from 0 to 9"]),
        (labelled(np.int32(3)), ["digits/val", "int32", "from 0 to 9"]),
        (labelled(3.0), ["digits/val", "float64", "from 0 to 9"]),
    ],
)
def test_samples_that_make_no_batch_are_refused(data: Items, shown, loaders_of: Any) -> None:
    labels = Labels(np.zeros(0, np.int64), tuple("0123456789"))
    with refused(*shown):
        list(loaders_of(of=(data, data), target=labels)[1])


def test_the_values_of_all_targets_count_classes(loaders_of: Any) -> None:
    data, several = Items([(IMAGE, IMAGE[0, 0, :2])] * 9), np.array([[1, 0], [1, 1], [0, 0]] * 3)
    for target, counts in (
        (Labels(np.array([0, 1, 1] * 3), ("a", "b")), [3, 6]),
        (MultiLabels(several, ("a", "b")), [6, 3]),
    ):
        assert loaders_of(of=(data, data), target=target)[0].info.class_counts().tolist() == counts
    none = RegressionTargets(several, ("a", "b"))
    assert loaders_of(of=(data, data), target=none)[0].info.class_counts is None


@pytest.mark.parametrize(
    ("data", "workers", "named"),
    [
        (Items([(IMAGE.byte(), 0)] * 9), 0, "float32"),
        (Items([(IMAGE, 0)] * 9, lambda items: (IMAGE[None], 0)), 1, "loader.num_workers=0"),
    ],
)
def test_what_no_model_and_no_worker_takes_is_told_in_a_line(
    data: Items, workers: int, named: str, loaders_of: Any
) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        val_loader = loaders_of(f"loader.num_workers={workers}", of=(data, data))[1]
        build_model(ModelConfig(name="small_cnn"), 3, 2)(next(iter(val_loader))[0])
    assert named in str(explain(error.value))


def test_mistakes_are_refused(loaders_of: Any) -> None:
    """Of a command, and of the function of a Dataset."""
    for override in ("data.name=digts", "loader=synthetic", "global_batch_size=65"):
        with refused(override.partition("=")[0]):
            loaders_of(override)
    for returned in ((1, 2), (None, None), ([IMAGE], [IMAGE])):
        with refused("data.name=digits", "OwnData"):
            loaders_of(of=returned)


def test_runs_with_the_loader_of_the_page_continue_in_mid_epoch_on_any_ranks(tmp_path) -> None:
    page = (REPOSITORY / "docs" / "own_data.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    loader = code.partition("class Stream")[2].partition("\n\n\n")[0]
    assert len([line for line in loader.splitlines() if line]) <= 30
    scripts = ["train.py", *rows_of("SCRIPTS")]
    for script in scripts:
        path = folder_with(tmp_path / script, script) / script
        (path.parent / "stream.py").write_text(code)
        found = f"import loaders.layouts\n\nloaders.layouts.__path__.append({str(path.parent)!r})\n"
        path.write_text(path.read_text().replace("@hydra", f"{found}@hydra"))
    options = ["data.layout=stream", "epochs=1", "log.every_steps=1", "global_batch_size=16"]
    options += ["model.kwargs.batch_norm=false", "resume=auto"]
    options += ["amp.dtype=float32"]  # where all techniques are merged into one script
    whole = tmp_path / "runs" / "whole"
    train("train.py", whole, *options, "max_steps=12", folder=tmp_path / "train.py")
    for script in scripts:
        run = tmp_path / "runs" / script
        for last_step in (5, 12):
            train(script, run, *options, f"max_steps={last_step}", folder=tmp_path / script)
        for tag, count in (("train/loss", 12), ("val/loss", 1)):
            one, parts = scalars_of(whole, tag), scalars_of(run, tag)
            assert len(one) == count
            assert parts[-count:] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in one]
