"""Ordinary Datasets and own loaders are as exact as images, for any workers, ranks, first batch."""

import itertools
import pickle
import random
import shutil
import traceback
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

import loaders.layouts
from conf.errors import cause_of
from examples.invert import Invert
from examples.tokens import Tokens
from loaders import build_loaders
from loaders.batch import tensors_of
from loaders.index import BadFileError
from loaders.own_data import OwnData
from loaders.targets import Target
from tests.helpers import DEVICES, REPOSITORY, folder_with, make_config, refused
from tests.processes import train
from tests.results import scalars_of
from tests.rows import rows

BAD = {0, 3, 20}
IMAGE = torch.zeros(3, 8, 8)
Pair = namedtuple("Pair", "left right")


class Photos(list[Any]):
    """A Dataset of photos, and of None where one is broken; it draws random numbers of three
    libraries, without a thought of seeds."""

    transform: Any = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandAugment()])

    def __getitem__(self, number: Any) -> Any:
        if super().__getitem__(number) is None:
            raise BadFileError("it is broken")
        pixels = torch.arange(3 * 48 * 48).mul(number + 7).remainder(251)
        image = self.transform(pixels.to(torch.uint8).view(3, 48, 48)).float()
        image = image + float(np.random.normal()) + random.random() + torch.rand(1)
        return {"image": image}, (number, f"name {number}")


class Faulty(Photos):
    """Its transform raises KeyError."""

    transform: Any = {}.__getitem__


PHOTOS = Photos([*range(64)]), Photos([*range(13)])
BROKEN = tuple(Photos([None if n in BAD else n for n in range(count)]) for count in (64, 13))


@pytest.fixture
def loaders_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the loaders of Datasets or of what else a user's function, `digits`, returns."""

    def build(*overrides: str, of: Any = PHOTOS, ranks=(0, 1), device="cpu", target=None) -> Any:
        def digits(data: Any, split: str) -> Any:
            found = dict(zip(("train", "val"), of, strict=True)).get(split)
            return OwnData(found, target) if isinstance(found, list) else found

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


def states() -> str:
    return str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def test_each_epoch_has_each_sample_once_for_any_workers_ranks_and_resumes(loaders_of) -> None:
    """The generators of the training process are left alone."""
    before, (train_loader, val_loader) = states(), loaders_of()
    whole = items_of(train_loader)
    assert sorted(number for batch in whole for number in batch) == list(range(64))
    other = items_of(train_loader, 4)
    assert [batch.keys() for batch in whole] != [batch.keys() for batch in other]
    first, second = ({k: v for b in epoch for k, v in b.items()} for epoch in (whole, other))
    assert not any(torch.equal(first[number], second[number]) for number in first)
    next(iter(val_loader))  # an evaluation that is left early
    val_batches = items_of(val_loader, 0)
    assert len(val_batches) == 2
    torch.testing.assert_close(items_of(val_loader, 0), val_batches, rtol=0, atol=0)
    assert states() == before
    ranks = [loaders_of(f"loader.num_workers={2 * n}", ranks=(n, 2))[0] for n in (0, 1)]
    ranks[1].set_epoch(3)
    for _ in zip(range(5), ranks[1], strict=False):
        pass
    state = ranks[1].state_dict()
    assert ranks[1].batches_done == 5
    for loader in ranks:
        loader.load_state_dict(state)
    batches = [a | b for a, b in zip(*map(items_of, ranks), strict=True)]
    torch.testing.assert_close(batches, whole[5:], rtol=0, atol=0)


def test_bad_samples_are_replaced_by_the_next_ones(loaders_of: Any) -> None:
    """Whether the training process finds them (on rank 0) or a worker."""
    ranks = [
        loaders_of("data.on_error=skip", f"loader.num_workers={rank}", of=BROKEN, ranks=(rank, 2))
        for rank in range(2)
    ]
    numbers, val_numbers = (
        [n for loader in loaders for batch in items_of(loader) for n in batch]
        for loaders in zip(*ranks, strict=True)
    )
    assert not BAD & set(numbers)
    assert set().union(*(loader.bad for loader, _ in ranks)) == BAD
    assert sorted(val_numbers) == [n for n in range(13) if n not in BAD]
    with refused("sample ", "it is broken"):
        items_of(loaders_of("loader.num_workers=1", of=(BROKEN[0], PHOTOS[1]))[0])
    with refused("digits/val", "13 bad samples", "it is broken"):
        loaders_of("data.on_error=skip", of=(PHOTOS[0], Photos([None] * 13)))


def test_workers_get_no_targets_whose_classes_are_counted(loaders_of: Any) -> None:
    target = Target("labels", np.arange(10**6) % 4 // 3, ("a", "b"))
    loader, _ = loaders_of(target=target)
    assert len(pickle.dumps(loader.batches.dataset)) < 10**5
    assert loader.info.class_counts().tolist() == [750_000, 250_000]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_keeps_its_traceback(workers: int, loaders_of: Any) -> None:
    options = "data.on_error=skip", f"loader.num_workers={workers}"
    with pytest.raises(KeyError) as error:
        list(loaders_of(*options, of=[Faulty(range(9))] * 2)[1])
    assert "image = self.transform(" in "".join(traceback.format_exception(error.value))


def test_a_billion_samples_cost_what_is_read_of_them(loaders_of: Any) -> None:
    """A resume at row 700 million takes no longer either."""
    many = OwnData(range(10**9), collate_fn=lambda items: (torch.tensor(items), 0))
    tracemalloc.start()
    try:
        loader, _ = loaders_of(of=(many, many))
        loader.load_state_dict(loader.state_dict() | {"row": 700_000_000})
        (first, _), (second, _) = itertools.islice(loader, 2)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert len({*first.tolist(), *second.tolist()}) == 16


@pytest.mark.parametrize("device", DEVICES)
def test_values_of_any_kind_and_nesting_make_a_batch_on_the_device(device, loaders_of: Any) -> None:
    pair = Pair(np.float32(2), (np.arange(2), "a"))
    items = [({"image": IMAGE, "pair": pair}, np.int64(n)) for n in range(9)]
    val_loader = loaders_of("loader.channels_last=true", of=(items, items), device=device)[1]
    [(inputs, targets), last] = val_loader
    assert {tensor.device.type for tensor in tensors_of((inputs, targets))} == {device}
    assert inputs["image"].is_contiguous(memory_format=torch.channels_last)
    assert (targets.tolist(), last[1].tolist()) == ([*range(8)], [8])
    left, (array, texts) = inputs["pair"]
    assert isinstance(inputs["pair"], Pair)
    assert (left.tolist(), array.shape, texts) == ([2] * 8, (8, 2), ["a"] * 8)


LABELS = Target("labels", np.array([0, 1, 1] * 3), ("a", "b"))
MISTAKES: list[Any] = [
    ("data.name=digts", PHOTOS, ["data.name"]),
    ("global_batch_size=65", PHOTOS, ["global_batch_size"]),
    ("seed=1", (None, None), ["data.name=digits", "OwnData"]),
    ("seed=1", (IMAGE, IMAGE), ["data.name=digits", "OwnData"]),
    ("seed=1", [(IMAGE, 0, 1)] * 9, ["tuple", "(inputs, targets)"]),
    ("seed=1", [(IMAGE, 0)] * 8 + [(IMAGE, 2)], ["digits/val", "sample 8", "from 0 to 1"]),
    ("seed=1", [(IMAGE, np.full(1, n // 8 * 2)) for n in range(9)], ["sample 8", "label 2"]),
    ("seed=1", [(IMAGE, np.int32(0))] * 9, ["digits/val", "int32", "from 0 to 1"]),
]


def test_numbers_that_float32_merges_are_refused(loaders_of: Any) -> None:
    for values in (1.6e9 + np.arange(9), 1.6e9 + np.arange(9)[:, None]):
        with refused("time", "1600000000"):
            loaders_of(target=Target("numbers", values, ("time",)))
    loaders_of(target=Target("numbers", names=("time",)))  # and no values are known


@pytest.mark.parametrize(("override", "data", "shown"), MISTAKES)
def test_mistakes_are_refused(override: str, data: Any, shown, loaders_of: Any) -> None:
    """Of a command, of the function of a Dataset, and of its samples."""
    of = (data, data) if isinstance(data, list) else data
    with refused(*shown):
        list(loaders_of(override, of=of, target=LABELS)[1])


def test_models_that_get_float64_name_what_to_return() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.nn.Linear(3, 2)(torch.from_numpy(np.ones((1, 3))))
    assert "float32" in str(cause_of(error.value))


def test_runs_with_the_loader_of_the_example_continue_in_mid_epoch_on_any_ranks(
    tmp_path, monkeypatch
) -> None:
    """Data that stream have no index, which loaders.check and loaders.pack would read."""
    paths = [*loaders.layouts.__path__, str(REPOSITORY / "examples")]
    monkeypatch.setattr(loaders.layouts, "__path__", paths)
    with refused("data.layout=stream", "loaders.check"):
        loaders.layouts.open_index(make_config("data.layout=stream").data)
    scripts = ["train.py", *rows("train_ddp.py")]
    for script in scripts:
        folder = tmp_path / script
        found = f"import loaders.layouts\n\nloaders.layouts.__path__.append({str(folder)!r})\n"
        folder_with(folder, script, ("@entry_point", found))
        shutil.copy(REPOSITORY / "examples" / "stream.py", folder)
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


def test_the_example_of_an_augmentation_inverts_what_its_numbers_choose() -> None:
    invert, images = Invert(), torch.rand(2, 3, 8, 8)
    rows = np.zeros(2, [*invert.columns])
    data: Any = SimpleNamespace(invert=0.5)
    invert.draw(rows, rows, data, lambda name, num: np.array([[0.1], [0.9]]))
    assert torch.equal(invert.apply(images, rows), torch.stack([1 - images[0], images[1]]))


def test_the_loss_over_tokens_of_the_example_is_exact_for_any_parts_of_a_batch() -> None:
    """Of 4 samples with 1, 2, 3 and 20 tokens: a rank with the first two has few."""
    no_loader: Any = None
    task = Tokens(make_config(), no_loader)
    outputs, targets = torch.randn(4, 20, 256), torch.randint(256, (4, 20))
    lengths = torch.tensor([1, 2, 3, 20])
    targets[torch.arange(20) >= lengths[:, None]] = -100
    parts = [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])]
    whole = task.loss(outputs, targets)
    torch.testing.assert_close(sum(task.loss(*part) for part in parts) / 2, whole)
    mean = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(whole, mean * 26 / (4 * task.tokens_per_sample))
    first, second = (task.sums(*part) for part in parts)
    assert task.metrics(first + second)["loss"] == pytest.approx(mean.item(), rel=1e-6)
