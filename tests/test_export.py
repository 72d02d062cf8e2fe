"""`export.py` writes and checks models that need no repository; test_predict.py has every task."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import export
from conf.errors import UserError
from models.small_cnn import SmallCNN
from tests.helpers import REPOSITORY, run_all
from tests.images import digit_folders, photos_in, save, smooth, turned
from tests.test_predict import SMALL, table

pytestmark = pytest.mark.slow

CLASSES = [f"digit {number}" for number in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on RGB images, and beside it its predictions and its weights alone."""
    folder = tmp_path_factory.mktemp("run")
    run, photos = folder / "mine", digit_folders(folder / "photos", range(10), 9, 10)
    options = [*SMALL, *photos_in(photos, "data.crop=[28,28]"), "model.channels_last=true"]
    commands = [
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={folder / 'val.csv'}"],
        ["export.py", f"run={run}", "format=safetensors", f"out={run}.safetensors"],
    ]
    run_all(commands, folder)
    return run


def test_weights_alone_have_the_names_of_the_classes(run: Path) -> None:
    with safe_open(f"{run}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == CLASSES


def test_weights_that_layers_share_are_written_for_each(run: Path, tmp_path, monkeypatch) -> None:
    def tied(in_channels: int, num_outputs: int, **kwargs: Any) -> nn.Module:
        model = SmallCNN(in_channels, num_outputs, **kwargs)
        norm = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
        norm.bias = norm.weight
        return model

    monkeypatch.setattr("models.small_cnn.SmallCNN", tied)
    file = tmp_path / "tied.safetensors"
    monkeypatch.setattr(
        "sys.argv", ["export.py", f"run={run}", "format=safetensors", f"out={file}"]
    )
    export.main()
    assert load_file(file).keys() == load_file(f"{run}.safetensors").keys()


def test_a_file_takes_any_number_of_raw_images(run: Path, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    file, rows = tmp_path / "mine.onnx", table(run.parent / "val.csv")
    run_all([["export.py", f"run={run}", "format=onnx", f"out={file}"]], tmp_path)
    images = np.stack([np.asarray(Image.open(row["path"]).convert("RGB")) for row in rows])
    session = pytest.importorskip("onnxruntime").InferenceSession(file)
    for count in (1, 3, 100):
        [answers] = session.run(None, {"images": images[:count]})
        np.testing.assert_allclose(answers.sum(axis=1), 1, rtol=1e-5)
        for answer, row in zip(answers, rows, strict=False):
            assert CLASSES[answer.argmax()] == row["prediction"]
            assert answer.max() == pytest.approx(float(row["probability"]), abs=1e-4)


@pytest.mark.parametrize(
    "sizes", [["resize=32"], ["resize=[40,32]"], ["resize=30", "crop=[20,24]"]]
)
def test_the_documented_lines_predict_what_predict_does(
    sizes: list[str], run: Path, tmp_path, monkeypatch, capsys
) -> None:
    """For photos of any shape, upright or not."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    photos, file, csv = tmp_path / "photos", tmp_path / "mine.onnx", tmp_path / "out.csv"
    for number, exif in enumerate([None, turned(6), turned(3)]):
        options = {} if exif is None else {"exif": exif}
        save(photos / f"{number}.jpg", smooth(number, 240 + 40 * number, 280), **options)
    use = [f"run={run}", *(f"data.{size}" for size in sizes)]
    commands = [
        ["predict.py", *use, f"data.root={photos}", f"out={csv}", "data.reduced_decoding=false"],
        ["export.py", *use, "format=onnx", f"out={file}"],
    ]
    run_all(commands, tmp_path)
    text = (REPOSITORY / "docs" / "export.md").read_text()
    (code,) = re.findall(r"<!-- onnx -->\n```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for row in table(csv):
        shutil.copy(row["path"], "photo.jpg")
        exec(code, {})
        name, _, probability = capsys.readouterr().out.rpartition(" ")
        assert name == row["prediction"]
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


@pytest.mark.parametrize(("form", "message"), [("onnx", "onnxruntime"), ("other", "2.0e-04")])
def test_without_a_package_or_if_a_file_computes_something_else_nothing_is_written(
    run: Path, tmp_path, monkeypatch, form: str, message: str
) -> None:
    def other(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    monkeypatch.setitem(export.FORMATS, "other", other)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    given = [f"run={run}", f"format={form}", f"out={tmp_path / 'mine'}"]
    monkeypatch.setattr("sys.argv", ["export.py", *given])
    with pytest.raises((UserError, ModuleNotFoundError), match=message):
        export.main()
    assert not list(tmp_path.iterdir())
