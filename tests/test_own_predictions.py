"""Predictions and exported files of models of own data."""

import csv
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import export
from loaders import build_loaders
from loaders.batch import part
from loaders.index import BadFileError
from loaders.own_data import OwnData
from loaders.predict import build_new_loader
from tasks import Task
from tests.helpers import REPOSITORY, make_config, refused
from tests.processes import execute, train

FILE = REPOSITORY / "data" / "mnist_mini.npz"
FILES = {"torch": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors"}


@pytest.mark.slow
def test_new_samples_are_predicted_and_exported_models_take_inputs_of_the_dataset(tmp_path) -> None:
    """The new samples here are those of the validation split."""
    run, new = tmp_path / "run", FILE
    train("train.py", run, "data=own", "data.name=digits", "max_steps=3", "log.images=0")
    use, prints = ["predict.py", f"run={run}"], tmp_path / "prints"
    execute([*use, "split=val", f"out={tmp_path / 'val.csv'}"], prints)
    execute([*use, f"data.root={new}", f"out={tmp_path / 'new.csv'}"], prints)
    execute(["export.py", f"run={run}", "format=torch", f"out={run}.pt2"], prints)
    rows, same = ((tmp_path / name).read_text() for name in ("new.csv", "val.csv"))
    assert rows == same
    expected = next(csv.DictReader(rows.splitlines()))
    assert expected["path"] == "sample 0"
    with np.load(FILE) as arrays:
        image = torch.from_numpy(arrays["val_images"][:1])[:, None].float() / 255
    answer = torch.export.load(f"{run}.pt2").module()(image)[0]
    probability = pytest.approx(float(expected["probability"]), abs=1e-4)
    assert answer.max().item() == probability
    text = execute([*use, "data.root=nowhere", "out=x"], prints, code=2)
    assert ("data.root=nowhere" in text, "Traceback" in text) == (True, False)


@pytest.mark.parametrize("form", export.FORMATS)
def test_inputs_of_any_nesting_are_exported(form: str, tmp_path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = self.same = nn.Linear(3, 2)

        def forward(self, inputs: Any) -> Tensor:
            return self.layer(inputs["left"] + 2 * inputs["right"][0])

    if form == "onnx":
        pytest.importorskip("onnxscript")
    given = {"left": torch.rand(5, 3), "right": (torch.rand(5, 3),)}
    exported = export.Exported(Model(), Task(make_config(), None)).eval()  # type: ignore[arg-type]
    compute = export.FORMATS[form](exported, given, {}, file := tmp_path / FILES[form])
    torch.testing.assert_close(compute(given), exported(given))
    torch.testing.assert_close(compute(part(given, 0, 1)), exported(given)[:1])
    if form == "safetensors":  # of layers that share weights, each has them
        assert len(load_file(file)) == 4


class Broken(list[int]):
    """Samples that cannot be loaded."""

    def __getitem__(self, number: Any) -> Any:
        raise BadFileError("it is broken")


def test_the_test_split_and_new_samples_are_those_of_a_function_of_its_own(monkeypatch) -> None:
    """New ones are reported if all are bad."""
    cfg, device = make_config("data=own", "data.name=digits"), torch.device("cpu")
    with refused("split=test", "split=val"):
        build_loaders(cfg, device, held_out="test")
    items = [(torch.zeros(1, 28, 28), number % 3) for number in range(9)]

    def digits(data: Any, split: str) -> OwnData:
        return OwnData(Broken(range(9)) if split == "new" else items)

    monkeypatch.setattr("loaders.own.digits.digits", digits)
    cfg.global_batch_size = 3
    _, test = build_loaders(cfg, device, held_out="test")
    assert torch.equal(torch.cat([labels for _, labels in test]), torch.arange(9) % 3)
    new = build_new_loader(cfg, None, 1, device)
    assert [*new] == []
    assert [*new.bad] == [*range(9)]
