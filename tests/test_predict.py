"""`predict.py` uses what a run has trained; for every task, the exported file answers alike."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.common import class_colours
from tests.helpers import REPOSITORY, answers_to, folder_with, has_ranks, run_all, summary_of
from tests.images import KINDS, common, make_photos, photos_in, save

SHORT = ["log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
SMALL = [*SHORT, "model.kwargs.width=8"]
LOADERS = ["loader=pytorch", "loader.num_workers=1", "loader=dali"]


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("script", ["train.py", "train_ddp_amp_ema.py"])
def test_the_validation_split_gives_the_runs_metrics_and_its_files_the_same_table_by_any_backend(
    script: str, tmp_path
) -> None:
    """To the last digit: the ranks evaluate with the same statistics of BatchNorm, although each
    trains with its own. Photos become grey for a model of grey digits."""
    run, photos, val = tmp_path / "run", tmp_path / "photos", tmp_path / "val.csv"
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        labels = arrays["val_labels"]
        for number, image in enumerate(arrays["val_images"][:101]):
            save(photos / f"part {number // 40}" / f"{number:03d}.png", image)
    cut = photos / "part 1" / "050.png"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (photos / "part 0" / "note.jpg").write_text("no image")
    (photos / "part 2" / "100b.jpg").write_bytes(b"")
    (photos / "part 2" / "README").touch()

    use = [str(REPOSITORY / "predict.py"), f"run={run}", f"data.cache_dir={tmp_path}"]
    of_photos = [*use, f"data.root={photos}"]
    loaders = LOADERS if script == "train.py" else LOADERS[:1]
    commands = [
        [script, f"output_dir={run}", *SMALL, "max_steps=30"],
        [*use, "split=val", f"out={val}"],
        *([*of_photos, loader, f"out={tmp_path / loader}"] for loader in loaders),
    ]
    here = folder_with(tmp_path / "s", script)
    _, printed, *others = run_all(commands, tmp_path, 1 + has_ranks(script), here)
    assert all("103 samples, 3 of them broken" in text for text in others)
    assert all("1 no ending" in text for text in others)
    for prints in tmp_path.glob("answers-*-1.txt"):  # of the other rank
        assert "samples" not in prints.read_text()
    metrics, summary = metrics_in(printed), summary_of(run)
    assert metrics == summary["best"] == {key: summary[key] for key in metrics}
    expected = table(val)
    right = np.array([int(row["prediction"]) for row in expected]) == labels
    assert right.mean() == metrics["val/top1"]
    for loader in loaders:
        rows = table(tmp_path / loader)
        assert [row["path"] for row in rows] == sorted(str(path) for path in photos.rglob("*.*"))
        broken = {Path(row["path"]).name: row["prediction"] for row in rows if row["error"]}
        assert broken == {"050.png": "", "100b.jpg": "", "note.jpg": ""}
        for row in rows:
            if not row["error"]:
                other = expected[int(Path(row["path"]).stem)]
                assert row["prediction"] == other["prediction"]
                same = pytest.approx(float(other["probability"]), abs=1e-4)
                assert float(row["probability"]) == same


CROP = (24, 32)
CASES = {
    "multilabel": ("several labels", ["model.kwargs.width=8"], "."),
    "regression": ("numbers", ["model.kwargs.width=8"], "."),
    "restoration": ("pairs", ["model=nafnet", "model.kwargs.num_blocks=[1,1]"], "test/blurry"),
    "segmentation": ("masks", ["model=unet", "model.kwargs.num_levels=2"], "images"),
}
"""Of each task, the kind of data (of `tests.images`), options and, below the data's folder, that of
the inputs of its validation split."""
PIXELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "restoration": lambda answer: 255 * answer,
    "segmentation": lambda answer: answer.argmax(axis=-1),
}
"""Tasks whose predictions are images, and how these follow from what the exported file answers."""
COLUMNS = {"multilabel": ["cat", "cow", "dog"], "regression": ["label"]}


@pytest.mark.parametrize("task", [task for task in CASES if CASES[task][0] in KINDS])
def test_the_run_any_folder_and_the_exported_file_give_the_same_predictions(
    task: str, tmp_path: Path
) -> None:
    """Those of the validation split, among them files that no run has seen."""
    pytest.importorskip(f"tasks.{task}")
    kind, options, below = CASES[task]
    if "model=" in options[0]:
        pytest.importorskip(f"models.{options[0].partition('=')[2]}")
    root, run, photos = tmp_path / "data", tmp_path / "run", tmp_path / "photos"
    data = KINDS[kind](root)
    shutil.copytree(root / below, photos)
    first = next(photos.rglob("*.png"))
    (photos / "below").mkdir()
    Image.open(first).convert("RGB").save(photos / "below" / "more.jpg")
    (photos / "broken.jpg").write_bytes(b"no image")
    val, some = tmp_path / "val", tmp_path / "some"
    options = [*SHORT, *data.options, *common(root), f"task={task}", *options]
    options += ["global_batch_size=4", f"data.crop=[{CROP[0]},{CROP[1]}]"]
    if task in ("multilabel", "segmentation"):
        options += ["loss.weights=auto"]
    options += ["data.hflip=0.5"] * (task == "regression")
    commands = [
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={val}"],
        ["predict.py", f"run={run}", f"data.root={photos}/below/..", f"out={some}"],
    ]
    commands += [["export.py", f"run={run}", "format=torch", f"out={run}.pt2"]]  # part: export
    trained, printed, *_ = run_all(commands, tmp_path)
    assert ("do not move with data.hflip:" in trained) == (task == "regression")
    assert metrics_in(printed) == summary_of(run)["best"]
    columns = COLUMNS.get(task, ["image"])
    rows, others = (
        table(out / "predictions.csv" if task in PIXELS else out) for out in (val, some)
    )
    assert list(rows[0]) == list(others[0]) == ["path", *columns, "error"]
    assert [Path(row["path"]).name for row in others if row["error"]] == ["broken.jpg"]
    again = {Path(row["path"]).name: [row[column] for column in columns] for row in others}
    assert len(again) == len(list(photos.rglob("*.*")))

    def values(cells: list[str]) -> np.ndarray:
        return np.asarray(Image.open(cells[0]) if task in PIXELS else cells, float)

    extra = {"metadata.json": ""}  # part: export
    program = torch.export.load(f"{run}.pt2", extra_files=extra).module()  # part: export
    assert '"in_channels": "3"' in extra["metadata.json"]  # part: export
    for row in rows:
        predicted, same = [row[column] for column in columns], again[Path(row["path"]).name]
        answers = [values(same)]
        image = np.asarray(Image.open(row["path"]).convert("RGB"))  # part: export
        y, x = (image.shape[0] - CROP[0]) // 2, (image.shape[1] - CROP[1]) // 2  # part: export
        cut = torch.tensor(image[None, y : y + CROP[0], x : x + CROP[1]])  # part: export
        answer = program(cut)[0].detach().numpy()  # part: export
        answers += [PIXELS.get(task, np.asarray)(answer)]  # part: export
        for answer in answers:
            is_other = abs(values(predicted) - answer) > (1 if task == "restoration" else 1e-4)
            assert is_other.mean() < 0.01
        if task == "segmentation":
            colours = Image.open(predicted[0]).getpalette()
            assert colours is not None
            assert colours[:9] == class_colours(3).flatten().tolist()
    if task in PIXELS:
        assert again["more.jpg"] == [str(some / "below" / "more.jpg.png")]
        assert not (some / "broken.jpg.png").exists()
        use = ["predict.py", f"run={run}", f"data.root={photos}", f"out={run / '../photos'}"]
        [(code, printed)] = answers_to([use], tmp_path)
        assert code == 2
        assert "data.root" in printed  # whose images would be replaced


MISTAKES = {  # what is wrong, and what the message names
    "predict.py run=outputs/nowhere": "run=outputs/nowhere",
    "predict.py data.root=nowhere": "data.root=nowhere",
    "predict.py split=test": "split=test",
    "predict.py": "out=",
    "predict.py device=cpu": "data.root=",
    "predict.py split=val data.hflop=1": "data.hflop=1",
    "predict.py split=val model.kwargs.width=16": "model.kwargs",
    "predict.py data.root=data loader=synthetic": "loader=pytorch",
    "predict.py data.root=runtime": "data.root=runtime",
    "predict.py split=val out=data": "out=data is a folder",
    "predict.py out": "key=value",
    "predict.py split=val data.root=OTHERS": "output 0: a then, b now",
    "export.py format=onyx": "format=onyx",
    "export.py format=torch": ".pt2",
    "export.py format=safetensors data.root=OTHERS": "output 0: a then, b now",
}


def test_mistakes_and_other_classes_end_in_a_few_lines_that_name_them(tmp_path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    photos, others = (make_photos(tmp_path / name, 12) for name in ("photos", "others"))
    (others / "a").rename(others / "d")  # as many classes as before, in another order
    data = photos_in(photos, "data.val_count=3")
    run_all([["train.py", f"output_dir={run}", *SMALL, *data, "max_steps=1"]], tmp_path)
    commands = []
    for line in MISTAKES:
        script, *given = line.replace("OTHERS", str(others)).split()
        commands.append([script, f"run={run}", *[f"out={out}"] * bool(given), *given])
    answers = answers_to(commands, tmp_path)
    for (line, message), (status, text) in zip(MISTAKES.items(), answers, strict=True):
        assert status == 2, line
        assert message in text, line
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 3, text
    assert not out.exists()
