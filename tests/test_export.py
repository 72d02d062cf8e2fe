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

import export
from tests.helpers import REPOSITORY, refused, run_all
from tests.images import digit_folders, photos_in
from tests.test_predict import SMALL, table

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


def test_a_file_takes_any_number_of_raw_images_and_the_documented_ten_lines_one(
    run: Path, tmp_path, monkeypatch, capsys
) -> None:
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

    text = (REPOSITORY / "docs" / "use.md").read_text()
    (code,) = re.findall(r"<!-- onnx -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(list(filter(None, code.splitlines()))) == 10
    shutil.copy(rows[5]["path"], tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("(224, 224)", "(28, 28)"), {})
    name, _, probability = capsys.readouterr().out.rpartition(" ")
    assert name == rows[5]["prediction"]
    assert float(probability) == pytest.approx(float(rows[5]["probability"]), abs=1e-4)


@pytest.mark.parametrize(
    ("form", "message"), [("onnx", "pip install onnx onnxruntime"), ("other", "2.0e-04")]
)
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
    with refused(message):
        export.main()
    assert not list(tmp_path.iterdir())
