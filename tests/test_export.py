"""`export.py` writes and checks models that need no repository; test_predict.py has every task."""

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import export
from conf.errors import UserError
from tests.helpers import REPOSITORY, run_all
from tests.images import digit_folders
from tests.test_predict import SMALL, table

CLASSES = [f"digit {number}" for number in range(10)]
FILES = {"onnx": "mine.onnx", "torch": "mine.pt2", "safetensors": "mine.safetensors"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on RGB images, its predictions and exported files."""
    folder = tmp_path_factory.mktemp("run")
    photos = digit_folders(folder / "photos", range(10), 9, 10)
    options = [*SMALL, "data=imagefolder", f"data.root={photos}", "data.resize=null"]
    options += ["data.crop=[28,28]", f"data.cache_dir={folder}", "global_batch_size=10"]
    run = folder / "mine"
    forms = [form for form in FILES if form != "onnx" or find_spec("onnxscript")]
    use = ["export.py", f"run={run}"]
    commands = [
        ["train.py", f"output_dir={run}", *options, "model.channels_last=true"],
        ["predict.py", f"run={run}", "split=val", f"out={folder / 'val.csv'}"],
        *([*use, f"format={form}", f"out={folder / FILES[form]}"] for form in forms),
    ]
    _, _, *printed = run_all(commands, folder)
    for text in printed:
        (difference,) = re.findall(r"largest difference (\S+) on \d+ validation images", text)
        assert float(difference) < 1e-4
    assert not list(folder.glob(".mine*"))
    with safe_open(folder / FILES["safetensors"], "pt") as file:
        assert json.loads(file.metadata()["classes"]) == CLASSES
    return run


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_a_file_takes_any_number_of_raw_images_and_gives_probabilities(
    run: Path, form: str
) -> None:
    rows = table(run.parent / "val.csv")
    images = np.stack([np.asarray(Image.open(row["path"]).convert("RGB")) for row in rows])
    parts = [images[:count] for count in (1, 3, 100)]
    if form == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(run.parent / FILES[form])
        metadata = session.get_modelmeta().custom_metadata_map
        answers_of = [session.run(None, {"images": part})[0] for part in parts]
    else:
        extra = {"metadata.json": ""}
        program = torch.export.load(run.parent / FILES[form], extra_files=extra).module()
        metadata = json.loads(extra["metadata.json"])
        answers_of = [program(torch.tensor(part)).detach().numpy() for part in parts]
    assert json.loads(metadata["classes"]) == CLASSES
    for answers in answers_of:
        np.testing.assert_allclose(answers.sum(axis=1), 1, rtol=1e-5)
        for answer, row in zip(answers, rows, strict=False):
            assert CLASSES[answer.argmax()] == row["prediction"]
            assert answer.max() == pytest.approx(float(row["probability"]), abs=1e-4)


def test_the_documented_ten_lines_work(run: Path, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    row = table(run.parent / "val.csv")[5]
    shutil.copy(row["path"], tmp_path / "photo.jpg")
    shutil.copy(run.parent / FILES["onnx"], tmp_path)
    text = (REPOSITORY / "docs" / "use.md").read_text()
    (code,) = re.findall(r"<!-- onnx -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(list(filter(None, code.splitlines()))) == 10
    code = code.replace("(224, 224)", "(28, 28)")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, _, probability = done.stdout.rpartition(" ")
    assert name == row["prediction"]
    assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("format=onyx", "format=onyx"),
        ("format=torch", "mine.onnx.*.pt2"),
        ("device=cpu", "pip install onnx onnxruntime"),  # nothing wrong but this
        ("format=other", "2.0e-04"),
    ],
)
def test_mistakes_missing_packages_and_files_that_compute_something_else_write_nothing(
    run: Path, tmp_path, monkeypatch, argument: str, message: str
) -> None:
    def other(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    monkeypatch.setitem(export.FORMATS, "other", other)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    given = [f"run={run}", "format=onnx", f"out={tmp_path / 'mine.onnx'}", argument]
    monkeypatch.setattr("sys.argv", ["export.py", *given])
    with pytest.raises(UserError, match=message):
        export.main()
    assert not list(tmp_path.iterdir())
