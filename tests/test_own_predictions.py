"""Predictions and exported files of models of own data."""

import csv
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import export
from loaders.batch import part
from loaders.index import BadFileError
from loaders.own_data import OwnData
from loaders.predict import build_new_loader, build_test_loader
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
    for path in ("none", ""):
        text = execute([*use, f"data.root={path}", "out=x"], prints, code=2)
        assert ("data.root=" in text, "Traceback" in text) == (True, False)


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


def test_the_test_split_is_that_of_a_function_of_its_own(monkeypatch) -> None:
    cfg = make_config("data=own", "data.name=digits")
    with refused("split=test", "split=val"):
        build_test_loader(cfg, None, torch.device("cpu"))
    items = [(torch.zeros(1, 28, 28), number % 3) for number in range(9)]
    monkeypatch.setattr("loaders.own.digits.digits", lambda data, split: OwnData(items))
    test = build_test_loader(cfg, None, torch.device("cpu"))
    assert torch.equal(torch.cat([labels for _, labels in test]), torch.arange(9) % 3)


def test_new_samples_are_reported_if_all_are_bad(monkeypatch) -> None:
    class Broken(list[int]):
        def __getitem__(self, number: Any) -> Any:
            raise BadFileError("it is broken")

    monkeypatch.setattr("loaders.own.digits.digits", lambda data, split: OwnData(Broken(range(9))))
    cfg = make_config("data=own", "data.name=digits")
    loader, _ = build_new_loader(cfg, None, 1, torch.device("cpu"))
    assert [*loader] == []
    assert [*loader.bad] == [*range(9)]
