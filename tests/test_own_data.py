"""Ordinary Datasets and own loaders are as exact as images, for any workers, ranks, first batch."""

import csv
import random
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import KeyPoints

import export
from conf.cli import explain
from conf.errors import UserError
from conf.schema import ModelConfig
from loaders import build_loaders
from loaders.batch import part, tensors_of
from loaders.targets import Labels
from models import build_model
from tasks import Task
from tests.helpers import (
    DEVICES,
    REPOSITORY,
    answers_to,
    folder_with,
    make_config,
    refused,
    run_all,
    scalars_of,
    train,
)

FILE = REPOSITORY / "data" / "mnist_mini.npz"
FILES = {"torch": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors"}
BAD = {3, 20}
IMAGE = torch.zeros(3, 8, 8)
Pair = namedtuple("Pair", "left right")


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

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], tuple[int, str]]:
        if self.items[number] is None:
            raise ValueError("it is broken")
        pixels = torch.arange(3 * 48 * 48).mul(number + 7).remainder(251)
        image = self.transform(pixels.to(torch.uint8).view(3, 48, 48)).float()
        image = image + float(np.random.normal()) + random.random() + torch.rand(1)
        return {"image": image}, (number, f"name {number}")


PHOTOS = Photos([*range(64)]), Photos([*range(13)])
BROKEN = tuple(Photos([None if n in BAD else n for n in range(count)]) for count in (64, 13))


@pytest.fixture
def loaders_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns the loaders of what a user's function returns."""

    def build(*overrides: str, of: Any = PHOTOS, rank=0, world_size=1, device="cpu") -> Any:
        monkeypatch.setattr("loaders.own.digits.digits", lambda data: of)
        options = ["data=own", "data.name=digits", "global_batch_size=8", "seed=1", *overrides]
        return build_loaders(make_config(*options), torch.device(device), rank, world_size)

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
    ranks = [loaders_of(f"loader.num_workers={2 * n}", rank=n, world_size=2)[0] for n in (0, 1)]
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


def test_bad_samples_are_as_bad_files(loaders_of: Any) -> None:
    """Whether the training process finds them (on rank 0) or a worker."""
    skip = "data.on_error=skip"
    ranks = [
        loaders_of(skip, f"loader.num_workers={rank}", of=BROKEN, rank=rank, world_size=2)
        for rank in range(2)
    ]
    numbers, val_numbers = (
        [n for loader in loaders for batch in items_of(loader) for n in batch]
        for loaders in zip(*ranks, strict=True)
    )
    assert not BAD & set(numbers)
    assert set().union(*(loader.state_dict()["bad"][0] for loader, _ in ranks)) == BAD
    assert sorted(val_numbers) == [n for n in range(13) if n != 3]
    with pytest.raises(UserError, match="max_bad_samples=1"):
        items_of(loaders_of(skip, "data.max_bad_samples=1", of=BROKEN)[0])
    with pytest.raises(UserError, match=r"sample \d+ .*it is broken"):
        items_of(loaders_of("loader.num_workers=1", of=BROKEN)[0])


def test_a_validation_split_needs_a_good_sample_but_not_as_its_first(loaders_of: Any) -> None:
    val = Photos([None, *range(1, 8)])
    [batch] = items_of(loaders_of("data.on_error=skip", of=(val, val))[1])
    assert sorted(batch) == [*range(1, 8)]
    with refused("digits/val"):
        loaders_of("data.on_error=skip", of=(val, Photos([None] * 4)))


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
    left, (array, *columns) = batch[0]["pair"]
    assert left.tolist() == [2] * 8
    assert array.shape == (8, 2)
    assert columns == [[text] * 8 for text in texts]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Items([(IMAGE, None)] * 9), "NoneType"),
        (Items([(IMAGE, 0, 1)] * 9), "tuple"),
        (Items([(IMAGE, 0)] * 5 + [(IMAGE[:1], 0)] * 4), r"float32 \(1, 8, 8\)"),
        (Items([(IMAGE, 0)] * 9, lambda items: {"image": 0}["mask"]), "mask"),
        (Items([(np.ones(3), 0)] * 9), r"sample \d are float64.*float32"),
        (Items([(IMAGE, 0)] * 9, lambda items: (IMAGE, {1})), "set"),
    ],
)
def test_samples_that_make_no_batch_are_refused(data: Items, named: str, loaders_of: Any) -> None:
    with pytest.raises(UserError, match=named):
        list(loaders_of(of=(data, data))[1])


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [(-1, "sample 5"), (10, "sample 5"), (np.int32(3), "int32"), (3.0, "float64")],
)
def test_labels_that_are_no_class_are_refused_with_their_sample(
    wrong: Any, shown: str, loaders_of: Any
) -> None:
    data = Items([(IMAGE, wrong if number == 5 else type(wrong)(3)) for number in range(9)])
    labels = Labels(np.zeros(0, np.int64), tuple("0123456789"))
    with refused("digits/val", shown, "from 0 to 9"):
        list(loaders_of(of=(data, data, labels))[1])


class Transformed(Items):
    def __init__(self, transform: Any) -> None:
        self.items, self.transform, self.collate_fn = [IMAGE] * 9, transform, None

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.transform(self.items[number]), 0


@pytest.mark.parametrize(
    ("transform", "workers", "named"),
    [
        (Tensor.byte, 0, "float32"),
        (Tensor.double, 0, "float32"),
        (lambda image: image, 1, "loader.num_workers=0"),
    ],
)
def test_what_no_model_and_no_worker_takes_is_told_in_a_line(
    transform: Any, workers: int, named: str, loaders_of: Any
) -> None:
    model = build_model(ModelConfig(name="small_cnn"), 3, 2)
    data = Transformed(transform)
    with pytest.raises(Exception) as error:  # noqa: PT011
        model(next(iter(loaders_of(f"loader.num_workers={workers}", of=(data, data))[1]))[0])
    told = explain(error.value)
    assert told is not None
    assert named in told


OVERRIDES = ["data.name=digts", "loader.num_workers=auto", "loader=dali", "global_batch_size=65"]


def test_mistakes_are_refused(loaders_of: Any) -> None:
    """Of a command, and of the function of a Dataset."""
    for override in OVERRIDES:
        with refused(override.partition("=")[0]):
            loaders_of(override)
    with refused("did you mean own?"):
        loaders_of("data.layout=onw")
    wrong: list[Any] = [Items([(IMAGE, 0)] * 9), (Items([]),), [1, 2], (iter([]),) * 2, None]
    for returned in wrong:
        with refused("data.name=digits"):
            loaders_of(of=returned)


# part: predict
def test_new_samples_are_predicted_and_exported_models_take_inputs_as_the_dataset_gives_them(
    tmp_path,
) -> None:
    """The new samples here are those of the validation split."""
    run, new = tmp_path / "run", FILE
    data = ["data=own", "data.name=digits", f"output_dir={run}", "max_steps=3", "log.images=0"]
    use = ["predict.py", f"run={run}"]
    commands = [["train.py", *data], [*use, "split=val", f"out={tmp_path / 'val.csv'}"]]
    commands += [[*use, f"data.root={new}", f"out={tmp_path / 'new.csv'}"]]
    for form, file in FILES.items():  # part: export
        commands += [["export.py", f"run={run}", f"format={form}", f"out={tmp_path / file}"]]
    run_all(commands, tmp_path)
    rows, same = ((tmp_path / name).read_text() for name in ("new.csv", "val.csv"))
    assert rows == same
    expected = next(csv.DictReader(rows.splitlines()))
    assert expected["path"] == "sample 0"
    with np.load(FILE) as arrays:  # part: export
        image = torch.from_numpy(arrays["val_images"][:1])[:, None].float() / 255
    answer = torch.export.load(tmp_path / FILES["torch"]).module()(image)[0]  # part: export
    probability = pytest.approx(float(expected["probability"]), abs=1e-4)  # part: export
    assert answer.max().item() == probability  # part: export
    told = answers_to([[*use, f"data.root={path}", "out=x"] for path in ("none", "")], tmp_path)
    for code, text in told:
        assert (code, "data.root=" in text, "Traceback" in text) == (2, True, False)


# part: export
@pytest.mark.parametrize("nested", [False, True])
def test_inputs_of_any_nesting_are_exported(nested: bool, tmp_path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs: Any) -> Tensor:
            return self.layer(inputs["left"] + 2 * inputs["right"][0] if nested else inputs)

    left, right = torch.rand(5, 3), torch.rand(5, 3)
    given = {"left": left, "right": (right,)} if nested else left
    exported = export.Exported(Model(), Task(make_config(), None)).eval()  # type: ignore[arg-type]
    for form, file in FILES.items():
        if form == "onnx":
            pytest.importorskip("onnxscript")
        compute = export.FORMATS[form](exported, given, {}, tmp_path / file)
        torch.testing.assert_close(compute(given), exported(given))
        torch.testing.assert_close(compute(part(given, 0, 1)), exported(given)[:1])
    with refused("Task", "dict"):
        Task(make_config(), None).predictions({"left": left})  # type: ignore[arg-type]


# part: compose
def test_runs_with_the_loader_of_the_page_continue_on_two_ranks_in_mid_epoch(tmp_path) -> None:
    page = (REPOSITORY / "docs" / "own_data.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    loader = code.partition("class Stream")[2].partition("\n\n\n")[0]
    assert len([line for line in loader.splitlines() if line]) <= 30
    scripts = ["train.py", "train_ddp.py"]
    for script in scripts:
        path = folder_with(tmp_path / script, script) / script
        (path.parent / "stream.py").write_text(code)
        found = f"import loaders.layouts\n\nloaders.layouts.__path__.append({str(path.parent)!r})\n"
        path.write_text(path.read_text().replace("@hydra", f"{found}@hydra"))
    options = ["data.layout=stream", "epochs=1", "log.every_steps=1", "global_batch_size=16"]
    options += ["model.kwargs.batch_norm=false", "resume=auto"]
    for script, last_step in [("train.py", 12), ("train_ddp.py", 5), ("train_ddp.py", 12)]:
        more = [*options, f"max_steps={last_step}"]
        train(script, tmp_path / "runs" / script, *more, folder=tmp_path / script)
    for tag, count in (("train/loss", 12), ("val/loss", 1)):
        one, parts = (scalars_of(tmp_path / "runs" / script, tag) for script in scripts)
        assert len(one) == count
        assert parts[-count:] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in one]
