"""Ordinary Datasets and own loaders are as exact as images, for any workers, ranks, first batch."""

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import KeyPoints

from conf.errors import UserError
from loaders import build_loaders
from loaders.batch import tensors_of
from loaders.own import OWN
from tests.helpers import DEVICES, REPOSITORY, folder_with, make_config, refused, scalars_of, train

BAD = {3, 20}
IMAGE = torch.zeros(3, 8, 8)


class Items(Dataset):
    """A Dataset of a list; its `collate_fn` is a function of the list's items."""

    def __init__(self, items: list[Any], collate_fn: Any = None) -> None:
        self.items, self.collate_fn = items, collate_fn

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Photos(Items):
    """What a user writes: random numbers of three libraries, no thought of seeds."""

    transform = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandAugment()])

    def __getitem__(self, number: int) -> tuple[dict[str, Any], tuple[int, str]]:
        if self.items[number] is None:
            raise ValueError("it is broken")
        pixels = torch.arange(3 * 48 * 48).mul(number + 7).remainder(251)
        image = self.transform(pixels.to(torch.uint8).view(3, 48, 48)).float()
        image = image + float(np.random.normal()) + random.random() + torch.rand(1)
        return {"image": image, "moved": (image[0, 0], number)}, (number, f"name {number}")


PHOTOS = Photos([*range(64)]), Photos([*range(13)])
BROKEN = tuple(Photos([None if n in BAD else n for n in range(count)]) for count in (64, 13))


@pytest.fixture
def loaders_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the loaders of what a user's function returns."""

    def build(
        *overrides: str, of: Any = PHOTOS, rank: int = 0, world_size: int = 1, device: str = "cpu"
    ) -> Any:
        monkeypatch.setitem(OWN, "items", lambda data: of)
        options = ["data=own", "data.name=items", "global_batch_size=8", "seed=1", *overrides]
        return build_loaders(make_config(*options), torch.device(device), rank, world_size)

    return build


def items_of(loader: Any, epoch: int = 3) -> list[dict[int, Tensor]]:
    """Of each batch, the images by sample."""
    loader.set_epoch(epoch)
    batches = []
    for inputs, (numbers, names) in loader:
        assert names == [f"name {number}" for number in numbers.tolist()]
        assert torch.equal(inputs["moved"][0], inputs["image"][:, 0, 0])
        batches.append(dict(zip(numbers.tolist(), inputs["image"].cpu(), strict=True)))
    return batches


def assert_equal(one: list[dict[int, Tensor]], other: list[dict[int, Tensor]]) -> None:
    assert [batch.keys() for batch in one] == [batch.keys() for batch in other]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


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
    assert_equal(items_of(val_loader), items_of(val_loader))  # the same in each validation


def test_workers_ranks_and_a_resume_change_no_bit(loaders_of: Any) -> None:
    ranks = [
        loaders_of(f"loader.num_workers={count}", rank=rank, world_size=2)[0]
        for rank, count in enumerate((2, 0))
    ]
    ranks[0].set_epoch(3)
    for _ in zip(range(5), ranks[0], strict=False):
        pass
    state = ranks[0].state_dict()
    assert ranks[0].batches_done == 5
    for loader in ranks:
        loader.load_state_dict(state)
    halves = [items_of(loader) for loader in ranks]
    whole = items_of(loaders_of()[0])
    assert_equal([a | b for a, b in zip(*halves, strict=True)], whole[5:])


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 2), (1, 1)])
def test_bad_samples_are_as_bad_files(num_workers: int, world_size: int, loaders_of: Any) -> None:
    options = ["data.on_error=skip", f"loader.num_workers={num_workers}"]
    ranks = [
        loaders_of(*options, of=BROKEN, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    numbers, val_numbers = (
        [n for loader in loaders for batch in items_of(loader) for n in batch]
        for loaders in zip(*ranks, strict=True)
    )
    assert not BAD & set(numbers)
    assert set().union(*(loader.state_dict()["bad"][0] for loader, _ in ranks)) == BAD
    assert sorted(val_numbers) == [n for n in range(13) if n != 3]
    with pytest.raises(UserError, match="max_bad_samples=1"):
        items_of(loaders_of(*options, "data.max_bad_samples=1", of=BROKEN)[0])
    with pytest.raises(UserError, match=r"sample \d+ .*it is broken"):
        items_of(loaders_of(*options, "data.on_error=raise", of=BROKEN)[0])


def test_a_validation_split_needs_a_good_sample_but_not_as_its_first(loaders_of: Any) -> None:
    val = Photos([None, *range(1, 8)])
    [batch] = items_of(loaders_of("data.on_error=skip", of=(val, val))[1])
    assert sorted(batch) == [*range(1, 8)]
    with refused("items/val"):
        loaders_of("data.on_error=skip", of=(val, Photos([None] * 4)))


class Pair(NamedTuple):
    left: Any
    right: Any


def test_numbers_texts_and_tuples_of_any_kind_make_a_batch(loaders_of: Any) -> None:
    texts = ["a", b"b", np.str_("c")]
    pair = Pair(np.float32(2), (np.arange(2), *texts))
    inputs = {"pair": pair, "points": KeyPoints(torch.ones(3, 2), canvas_size=(4, 4))}
    data = Items([(inputs, np.int64(number)) for number in range(9)])
    [batch, last] = loaders_of(of=(data, data))[1]
    assert (batch[1].tolist(), last[1].tolist()) == ([*range(8)], [8])
    left, (array, *columns) = batch[0]["pair"]
    assert isinstance(batch[0]["pair"], Pair)
    assert left.tolist() == [2] * 8
    assert array.shape == (8, 2)
    assert columns == [[text] * 8 for text in texts]
    assert batch[0]["points"].shape == (8, 3, 2)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([(IMAGE, None)] * 9, "NoneType"),
        ([(IMAGE, 0, 1)] * 9, "tuple"),
        ([(IMAGE, 0)] * 5 + [(IMAGE[:1], 0)] * 4, r"float32 \(1, 8, 8\)"),
        ([({"a": IMAGE}, 0)] * 5 + [({"b": IMAGE}, 0)] * 4, "'b'"),
        ([(IMAGE, (0, 1))] * 5 + [(IMAGE, (0,))] * 4, "sample"),
        (Items([(IMAGE, 0)] * 9, lambda items: {"image": 0}["mask"]), "mask"),
        (Items([(IMAGE, 0)] * 9, lambda items: (IMAGE, {1})), "set"),
    ],
)
def test_samples_that_make_no_batch_are_refused(items: Any, named: str, loaders_of: Any) -> None:
    data = items if isinstance(items, Items) else Items(items)
    with pytest.raises(UserError, match=named):
        list(loaders_of(of=(data, data))[1])


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_any_nesting_come_to_the_device(device: str, loaders_of: Any) -> None:
    loader, _ = loaders_of("loader.channels_last=true", device=device)
    inputs, (numbers, _) = next(iter(loader))
    assert {tensor.device.type for tensor in tensors_of((inputs, numbers))} == {device}
    assert inputs["image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.name=digts", "data.name"),
        ("loader.num_workers=auto", "loader.num_workers"),
        ("loader=dali", "loader"),
        ("global_batch_size=65", "global_batch_size"),
        ("data.layout=onw", "did you mean own?"),
    ],
)
def test_mistakes_are_refused(override: str, named: str, loaders_of: Any) -> None:
    with refused(named):
        loaders_of(override)


def test_a_function_that_returns_something_else_is_refused(loaders_of: Any) -> None:
    wrong: list[Any] = [Items([(IMAGE, 0)] * 9), (Items([]),), [1, 2], (iter([]),) * 2, None]
    for returned in wrong:
        with refused("data.name=items"):
            loaders_of(of=returned)


# part: compose
def test_runs_with_the_loader_of_the_page_continue_on_two_ranks_in_mid_epoch(tmp_path) -> None:
    page = (REPOSITORY / "docs" / "own_data.md").read_text().partition("## Data that streams")[2]
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    loader = code.partition("class Stream")[2].partition("\n\n\n")[0]
    assert len([line for line in loader.splitlines() if line]) <= 30
    options = ["data.layout=stream", "epochs=1", "log.every_steps=1", "global_batch_size=16"]
    options += ["model.kwargs.batch_norm=false", "max_steps=12"]
    for script, run, more in (
        ("train.py", "one", []),
        ("train_ddp.py", "parts", ["max_steps=5"]),
        ("train_ddp.py", "parts", ["resume=auto"]),
    ):
        project = tmp_path / script.removesuffix(".py")
        if not project.exists():
            text = (folder_with(project, script) / script).read_text()
            (project / "mine").mkdir()
            (project / "mine" / "stream.py").write_text(code)
            own = 'import loaders\n\nloaders.LOADERS["stream"] = "mine.stream.build_loaders"\n\n'
            (project / script).write_text(text.replace("@hydra", f"{own}@hydra", 1))
        train(script, tmp_path / run, *options, *more, folder=project)
    for tag, count in (("train/loss", 12), ("val/loss", 1)):
        one, parts = (scalars_of(tmp_path / run, tag) for run in ("one", "parts"))
        assert len(one) == count
        assert parts[-count:] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in one]
