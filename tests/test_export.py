"""`export.py` writes and checks models that need no repository; test_predict.py has every task."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import export
from conf.errors import UserError
from tests.formats import write_all
from tests.images import digit_folders, photos_in, save, smooth, turned
from tests.processes import execute, train
from tests.test_predict import SMALL, table

pytestmark = pytest.mark.slow

CLASSES = [f"digit {number}" for number in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on RGB images, and beside it its weights alone."""
    folder = tmp_path_factory.mktemp("run")
    run, photos = folder / "mine", digit_folders(folder / "photos", range(10), 9, 10)
    options = [*SMALL, *photos_in(photos, "data.crop=[28,28]"), "model.channels_last=true"]
    train("train.py", run, *options)
    command = ["export.py", f"run={run}", "format=safetensors", f"out={run}.safetensors"]
    execute(command, folder / "prints")
    return run


def test_weights_alone_have_the_names_of_the_classes(run: Path) -> None:
    with safe_open(f"{run}.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == CLASSES


def test_weights_that_layers_share_are_written_for_each(tmp_path) -> None:
    layer, file = nn.Linear(3, 3, bias=False), tmp_path / "tied.safetensors"
    task: Any = SimpleNamespace(predictions=nn.Identity())
    exported = export.Exported(nn.Sequential(layer, layer), task)
    export.FORMATS["safetensors"](exported, torch.rand(2, 3), {}, file)
    assert load_file(file).keys() == {"0.weight", "1.weight"}


@pytest.mark.parametrize(
    "changes",
    [
        ["resize=[40,32]", "background=[10,200,70]"],
        ["resize=30", "crop=[20,24]", "exif=false"],
    ],
)
def test_the_example_predicts_what_predict_does(changes: list[str], run: Path, tmp_path) -> None:
    """For photos of any shape and of all formats, upright or not."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    photos, file, csv = tmp_path / "photos", tmp_path / "mine.onnx", tmp_path / "out.csv"
    write_all(photos, background=[255, 255, 255])
    for number, orientation in enumerate([1, 6, 3]):
        image = smooth(number, 240 + 40 * number, 280)
        save(photos / f"{number}.jpg", image, exif=turned(orientation))
        save(photos / f"{number}.png", image, exif=turned(orientation))
    use = [f"run={run}", *(f"data.{change}" for change in changes)]
    commands = [
        ["predict.py", *use, f"data.root={photos}", f"out={csv}", "data.reduced_decoding=false"],
        ["export.py", *use, "format=onnx", f"out={file}"],
        ["examples/use_onnx.py", str(file), *map(str, sorted(photos.iterdir()))],
    ]
    *_, printed = [execute(command, tmp_path / "prints") for command in commands]
    found = {path: answer for path, *answer in (line.split("\t") for line in printed.splitlines())}
    rows = table(csv)
    assert len(rows) == len(found) == len(list(photos.iterdir()))
    for row in rows:
        name, probability = found[row["path"]]
        assert name == row["prediction"], row["path"]
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_a_file_that_computes_something_else_is_not_written(
    run: Path, tmp_path, monkeypatch
) -> None:
    def other(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    monkeypatch.setitem(export.FORMATS, "other", other)
    command = ["export.py", f"run={run}", "format=other", f"out={tmp_path / 'mine'}"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(UserError, match=r"2\.0e-04"):
        export.main()
    assert not list(tmp_path.iterdir())
