"""`export.py` writes models that need no repository, and proves them."""

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import export
from conf.cli import explain
from conf.errors import UserError
from tests.helpers import REPOSITORY, train
from tests.test_predict import SMALL, run_on_labels, run_on_masks, table, use
from tests.test_weights import digit_folders

NAMES = list("0123456789")


def needs_onnx() -> Any:
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "mine"
    train("train.py", folder, *SMALL, "model.channels_last=true")
    return folder


@pytest.fixture(scope="module")
def predicted(run: Path) -> list[dict[str, str]]:
    """What predict.py says of the validation split."""
    use("predict.py", run.parent, f"run={run}", "split=val", f"out={run.parent / 'val.csv'}")
    return table(run.parent / "val.csv")


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    """(2000, 28, 28, 1) uint8: the validation images as they are in the file."""
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        return arrays["val_images"][..., None]


def run_export(*arguments: str) -> str:
    """What export.py printed, run in this process, which imports onnxscript once."""
    printed = io.StringIO()
    with mock.patch("sys.argv", ["export.py", *arguments]), redirect_stdout(printed):
        export.main()
    return printed.getvalue()


def exported(run: Path, form: str, name: str, *overrides: str) -> Path:
    out = run.parent / name
    said = run_export(f"run={run}", f"format={form}", f"out={out}", *overrides)
    (told,) = re.findall(r"largest difference (\S+) on 64 validation images", said)
    assert float(told) < 1e-4
    assert not list(run.parent.glob(".*"))
    return out


def check(answers: np.ndarray, predicted: list[dict[str, str]]) -> None:
    np.testing.assert_allclose(answers.sum(axis=1), 1, rtol=1e-5)
    for answer, row in zip(answers, predicted, strict=False):
        assert NAMES[answer.argmax()] == row["prediction"]
        assert answer.max() == pytest.approx(float(row["probability"]), abs=1e-4)


def test_onnx_takes_any_number_of_raw_images_and_gives_probabilities(
    run, predicted, digits
) -> None:
    onnxruntime = needs_onnx()
    session = onnxruntime.InferenceSession(exported(run, "onnx", "mine.onnx"))
    assert session.get_inputs()[0].type == "tensor(uint8)"
    for count in (1, 3, 100):
        check(session.run(None, {"images": digits[:count]})[0], predicted)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == NAMES


def test_a_program_of_torch_export_does_the_same(run, predicted, digits) -> None:
    out = exported(run, "torch", "mine.pt2")
    extra = {"metadata.json": ""}
    program = torch.export.load(out, extra_files=extra).module()
    for count in (1, 3, 100):
        check(program(torch.from_numpy(digits[:count])).detach().numpy(), predicted)
    assert json.loads(json.loads(extra["metadata.json"])["classes"]) == NAMES


def test_weights_carry_the_class_names_and_start_another_run(run, tmp_path) -> None:
    out = exported(run, "safetensors", "mine.safetensors")
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == NAMES
    said = train("train.py", tmp_path / "next", *SMALL, f"model.weights={out}", "max_steps=1")
    assert "14 of 14 parameter tensors are loaded" in said


def test_the_documented_ten_lines_work(tmp_path) -> None:
    needs_onnx()
    photos = digit_folders(tmp_path / "photos", range(3, 6), 30, 4)
    data = ["data=imagefolder", f"data.root={photos}", "data.resize=null", "data.crop=[28,28]"]
    run = tmp_path / "run"
    train("train.py", run, *SMALL, *data, f"data.cache_dir={tmp_path}", "global_batch_size=10")
    out, val = tmp_path / "mine.onnx", tmp_path / "val.csv"
    run_export(f"run={run}", "format=onnx", f"out={out}")
    use("predict.py", tmp_path, f"run={run}", "split=val", f"out={val}")
    row = table(val)[5]
    shutil.copy(row["path"], tmp_path / "photo.jpg")
    text = (REPOSITORY / "docs" / "use.md").read_text()
    (code,) = re.findall(r"<!-- onnx -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(list(filter(None, code.splitlines()))) == 10
    code = code.replace("(224, 224)", "(28, 28)")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, _, probability = done.stdout.rpartition(" ")
    assert name == row["prediction"]
    assert name in {"digit 3", "digit 4", "digit 5"}
    assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_a_restorer_returns_images(tmp_path) -> None:
    pytest.importorskip("tasks.restoration")
    pytest.importorskip("models.nafnet")
    onnxruntime = needs_onnx()
    random = np.random.default_rng(0)
    for name in ("input", "target"):
        for number in range(12):
            path = tmp_path / "pairs" / name / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            small = random.integers(0, 255, (4, 6, 3), np.uint8)
            Image.fromarray(small).resize((48, 32)).save(path)
    folder = tmp_path / "run"
    data = ["data=pairs", f"data.root={tmp_path / 'pairs'}", "data.crop=[16,16]", "epochs=1"]
    data += [f"data.cache_dir={tmp_path}", "global_batch_size=4", "log.images=0"]
    data += ["model=nafnet", "model.kwargs.width=4", "task=restoration", "data.val_count=3"]
    train("train.py", folder, *data, "optimizer.warmup_epochs=0")
    for form, name in (("onnx", "net.onnx"), ("torch", "net.pt2")):
        arguments = [f"run={folder}", f"format={form}", f"out={tmp_path / name}"]
        said = run_export(*arguments, "data.crop=[32,48]")
        assert "on 3 validation images" in said
    arguments = [f"run={folder}", f"data.root={tmp_path / 'pairs' / 'input'}", "data.crop=null"]
    use("predict.py", tmp_path, *arguments, f"out={tmp_path / 'restored'}")
    image = np.array(Image.open(tmp_path / "pairs" / "input" / "03.png"))[None]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    program = torch.export.load(tmp_path / "net.pt2").module()
    expected = np.array(Image.open(tmp_path / "restored" / "03.png")) / 255
    for answer in (
        session.run(None, {"images": image})[0],
        program(torch.from_numpy(image)).detach().numpy(),
    ):
        assert answer.shape == (1, 32, 48, 3)
        assert abs(answer[0] - expected).max() < 0.6 / 255


@pytest.mark.parametrize("task", ["multilabel", "regression", "segmentation"])
def test_every_task_has_its_answers(tmp_path, task: str) -> None:
    is_mask = task == "segmentation"
    run = run_on_masks(tmp_path) if is_mask else run_on_labels(tmp_path, task)[0]
    out = tmp_path / "mine.pt2"
    run_export(f"run={run}", "format=torch", f"out={out}")
    extra = {"metadata.json": ""}
    program = torch.export.load(out, extra_files=extra).module()
    target = json.loads(json.loads(extra["metadata.json"])["target"])
    name, kind = ("val", "masks") if is_mask else ("val.csv", {"regression": "numbers"}.get(task))
    assert target["kind"] == (kind or "several labels")
    use("predict.py", tmp_path, f"run={run}", "split=val", f"out={tmp_path / name}")
    for row in table(tmp_path / name / "predictions.csv" if is_mask else tmp_path / name):
        image = np.array(Image.open(row["path"]))
        image = image[6:30, 4:36] if is_mask else image
        answer = program(torch.from_numpy(image.copy())[None])[0].detach().numpy()
        if is_mask:
            np.testing.assert_allclose(answer.sum(axis=-1), 1, rtol=1e-5)
            assert np.mean(answer.argmax(axis=-1) == np.asarray(Image.open(row["image"]))) > 0.99
        else:
            names = target["names"] if task == "regression" else target["classes"]
            assert answer == pytest.approx([float(row[n]) for n in names], abs=1e-4)


def test_a_file_that_computes_something_else_is_not_written(run, tmp_path, monkeypatch) -> None:
    def wrong(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    out = tmp_path / "mine.onnx"
    monkeypatch.setitem(export.FORMATS, "onnx", wrong)
    monkeypatch.setattr("sys.argv", ["export.py", f"run={run}", "format=onnx", f"out={out}"])
    with pytest.raises(UserError, match="the exported model differs .* by 2.0e-04"):
        export.main()
    assert not list(tmp_path.iterdir())


def test_without_onnx_the_message_says_what_to_install(run, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    out = tmp_path / "mine.onnx"
    monkeypatch.setattr("sys.argv", ["export.py", f"run={run}", "format=onnx", f"out={out}"])
    with pytest.raises(UserError, match="needs onnxruntime: pip install onnx onnxruntime onnx"):
        export.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=outputs/nowhere"], "is not the folder of a run: there is no"),
        (["format=onyx"], "format=onyx is unknown"),
        (["format=torch", "out=mine.pth"], "torch.export.load reads files that end in .pt2 only"),
        (["data.hflop=1"], "data.hflop=1 does not fit the configuration"),
    ],
)
def test_mistakes_end_in_one_clear_error(
    run, tmp_path, monkeypatch, arguments: list[str], message: str
) -> None:
    given = [f"run={run}", "format=onnx", f"out={tmp_path / 'mine.onnx'}", *arguments]
    monkeypatch.setattr("sys.argv", ["export.py", *given])
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        export.main()
    told = explain(raised.value)
    assert told is not None
    assert "\n" not in told
