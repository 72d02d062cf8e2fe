"""`export.py` writes and checks models that need no repository; test_predict.py has every task."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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
from tests.test_predict import NAMES, SMALL, digit_folders, table

CLASSES = sorted(NAMES)
FILES = {"onnx": "mine.onnx", "torch": "mine.pt2", "safetensors": "mine.safetensors"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on RGB images, its predictions and exported files."""
    folder = tmp_path_factory.mktemp("run")
    photos = digit_folders(folder / "photos", 90, 102)
    options = [*SMALL, "data=imagefolder", f"data.root={photos}", "data.resize=null"]
    options += ["data.crop=[28,28]", f"data.cache_dir={folder}", "global_batch_size=10"]
    run = folder / "mine"
    forms = [form for form in FILES if form != "onnx" or find_spec("onnxscript")]
    commands = [
        ["train.py", f"output_dir={run}", *options, "model.channels_last=true"],
        ["predict.py", f"run={run}", "split=val", f"out={folder / 'val.csv'}"],
        *(
            ["export.py", f"run={run}", f"format={form}", f"out={folder / FILES[form]}"]
            for form in forms
        ),
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
    file = run.parent / FILES[form]
    session: Any = None
    program: Any = None
    if form == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(file)
        assert session.get_inputs()[0].type == "tensor(uint8)"
        metadata = session.get_modelmeta().custom_metadata_map
    else:
        extra = {"metadata.json": ""}
        program = torch.export.load(file, extra_files=extra).module()
        metadata = json.loads(extra["metadata.json"])
    assert json.loads(metadata["classes"]) == CLASSES
    rows = table(run.parent / "val.csv")
    images = np.stack([np.asarray(Image.open(row["path"]).convert("RGB")) for row in rows])
    for count in (1, 3, 100):
        some = images[:count]
        if session:
            answers = session.run(None, {"images": some})[0]
        else:
            answers = program(torch.from_numpy(some)).detach().numpy()
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


@pytest.fixture
def run_export(run: Path, tmp_path, monkeypatch) -> Callable[..., None]:
    """Calls export.py with these arguments besides others that are right; it writes nothing."""

    def call(*arguments: str) -> None:
        given = [f"run={run}", "format=onnx", f"out={tmp_path / 'mine.onnx'}", *arguments]
        monkeypatch.setattr("sys.argv", ["export.py", *given])
        try:
            export.main()
        finally:
            assert not list(tmp_path.iterdir())

    return call


def test_a_file_that_computes_something_else_is_not_written(run_export, monkeypatch) -> None:
    def wrong(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    monkeypatch.setitem(export.FORMATS, "onnx", wrong)
    with pytest.raises(UserError, match=r"2.0e-04"):
        run_export()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("format=onyx", "format=onyx"),
        ("format=torch", "mine.onnx.*.pt2"),
        ("device=cpu", "pip install onnx onnxruntime"),  # nothing wrong but this
    ],
)
def test_mistakes_and_missing_packages_are_named(
    run_export, monkeypatch, argument: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=message):
        run_export(argument)
