"""`predict.py` uses what a run has trained; for every task, the file that `export.py` writes answers alike."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tasks.palette import palette
from tests.helpers import REPOSITORY, answers_to, checkpoint_of, has_ranks, summary_of
from tests.torchrun import TWO_RANKS, torchrun

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BACKENDS = {
    "pytorch": ["loader.num_workers=0"],
    "workers": ["loader.num_workers=1"],
    "dali": ["loader=dali"],
}
BROKEN = ("note.jpg", "050.png", "100b.jpg")


def run_all(tmp_path: Path, *commands: list[str], num_ranks: int = 1) -> list[str]:
    """What these command lines print; one process, or so many ranks, run them in turn."""
    answers = answers_to(list(commands), tmp_path, num_ranks)
    for command, (code, printed) in zip(commands, answers, strict=True):
        assert code == 0, f"{' '.join(command)}\n{printed}"
    return [printed for _, printed in answers]


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def program_of(file: Path) -> tuple[Any, dict[str, Any]]:  # part: export
    """A program of torch.export that takes one image (H, W, C), and the description of its target."""
    extra = {"metadata.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    target = json.loads(json.loads(extra["metadata.json"])["target"])
    return lambda image: program(torch.from_numpy(image.copy())[None])[0].detach().numpy(), target


def backends() -> dict[str, list[str]]:
    """Overrides by the name of a backend that is installed."""
    try:
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError:
        return {name: BACKENDS[name] for name in BACKENDS if name != "dali"}
    return BACKENDS


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Path, list[str]]:
    """Digits and three broken files below folders, and what the digits are in the order of the files."""
    root = tmp_path_factory.mktemp("photos")
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        images, labels = arrays["val_images"][:101], arrays["val_labels"][:101]
    for number, image in enumerate(images):
        folder = root / f"part {number // 40}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03d}.png")
    whole = (root / "part 1" / "050.png").read_bytes()
    (root / "part 1" / "050.png").write_bytes(whole[: len(whole) // 2])
    (root / "part 0" / "note.jpg").write_text("no image")
    (root / "part 2" / "100b.jpg").write_bytes(b"")
    return root, [NAMES[label] for label in labels]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Training data in class folders whose names are words."""
    root = tmp_path_factory.mktemp("digits")
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        for split, count in [("train", 1500), ("val", 203)]:
            images, labels = arrays[f"{split}_images"][:count], arrays[f"{split}_labels"][:count]
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                folder = root / split / NAMES[label]
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits: Path) -> Path:
    """A run on photos: images are decoded to RGB."""
    folder = tmp_path_factory.mktemp("run") / "mine"
    data = ["data=imagefolder", f"data.root={digits}", "data.resize=32", "data.crop=[28,28]"]
    data += [f"data.cache_dir={folder.parent}", "global_batch_size=50"]
    run_all(folder.parent, ["train.py", f"output_dir={folder}", *SMALL, *data, "epochs=3"])
    return folder


@pytest.fixture(scope="module")
def predicted(run: Path, photos) -> dict[str, Path]:
    """The tables of predictions on the photos, by backend."""
    where = [f"run={run}", f"data.root={photos[0]}", f"data.cache_dir={run.parent}"]
    tables = {name: run.parent / f"{name}.csv" for name in backends()}
    commands = [
        ["predict.py", *where, *BACKENDS[name], f"out={path}"] for name, path in tables.items()
    ]
    for printed in run_all(run.parent, *commands):
        assert "103 images, 3 of them broken" in printed
    return tables


def test_a_folder_of_images_becomes_a_table_with_class_names(photos, predicted) -> None:
    root, truth = photos
    rows = table(predicted["pytorch"])
    assert list(rows[0]) == [
        *("path", "prediction", "probability"),
        *(f"{what}{i}" for i in range(2, 6) for what in ("top", "probability")),
        "error",
    ]
    assert [row["path"] for row in rows] == sorted(str(path) for path in root.rglob("*.*"))
    broken = [row for row in rows if row["error"]]
    assert sorted(Path(row["path"]).name for row in broken) == sorted(BROKEN)
    assert {row["prediction"] for row in broken} == {""}
    whole = [row for row in rows if not row["error"]]
    right = [row["prediction"] == truth[int(Path(row["path"]).stem)] for row in whole]
    assert np.mean(right) > 0.6
    for row in whole:
        shares = [float(row[key]) for key in row if key.startswith("probability")]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.00001
        classes = [row["prediction"], *(row[f"top{i}"] for i in range(2, 6))]
        assert len(set(classes) & set(NAMES)) == 5


def test_any_backend_and_number_of_ranks_give_the_same_table(
    run, photos, predicted, tmp_path
) -> None:
    one = predicted["pytorch"]
    for path in predicted.values():
        for row, other in zip(table(one), table(path), strict=True):
            assert (row["path"], bool(row["error"])) == (other["path"], bool(other["error"]))
            if not row["error"]:  # DALI's resizing rounds differently
                same = pytest.approx(float(other["probability"]), abs=0.02)
                assert float(row["probability"]) == same
    where = [f"run={run}", f"data.root={photos[0]}", f"data.cache_dir={tmp_path}"]
    two = tmp_path / "two.csv"
    run_all(tmp_path, ["predict.py", *where, f"out={two}"], num_ranks=2)
    assert two.read_bytes() == one.read_bytes()


def test_torchrun_starts_it_with_a_backend_that_meets_a_broken_file(run, photos, tmp_path) -> None:
    out, prints = tmp_path / "predictions.csv", tmp_path / "prints.txt"
    loader = list(backends().values())[-1]
    arguments = [f"run={run}", f"data.root={photos[0]}", f"out={out}", *loader]
    arguments = [*TWO_RANKS, "predict.py", *arguments, f"data.cache_dir={tmp_path}"]
    process = torchrun(arguments, REPOSITORY, prints)
    process.join(240)
    assert process.exitcode == 0, prints.read_text()
    assert prints.read_text().count("3 of them broken") == 1
    assert sorted(Path(row["path"]).name for row in table(out) if row["error"]) == sorted(BROKEN)


@pytest.mark.parametrize("script", ["train_ema.py", "train_ddp_amp.py"])
def test_the_validation_split_gives_the_runs_metrics_to_the_last_digit(tmp_path, script) -> None:
    folder, out = tmp_path / "run", tmp_path / "val.csv"
    _, printed = run_all(
        tmp_path,
        [script, f"output_dir={folder}", *SMALL, "max_steps=30"],
        ["predict.py", f"run={folder}", "split=val", f"out={out}"],
        num_ranks=2 if has_ranks(script) else 1,
    )
    metrics, summary = metrics_in(printed), summary_of(folder)
    assert metrics == summary["best"] == {key: summary[key] for key in metrics}
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        labels = arrays["val_labels"]
    right = [int(r["prediction"]) == label for r, label in zip(table(out), labels, strict=True)]
    assert np.mean(right) == metrics["val/top1"]


def test_photos_become_grey_for_a_model_of_grey_digits(photos, tmp_path) -> None:
    run = [f"run={tmp_path / 'run'}", f"data.cache_dir={tmp_path}"]
    on_photos = ["predict.py", *run, f"data.root={photos[0]}"]
    outs = [tmp_path / f"{name}.csv" for name in backends()]
    printed = run_all(
        tmp_path,
        ["train.py", f"output_dir={tmp_path / 'run'}", *SMALL, "max_steps=100"],
        ["predict.py", *run, "split=val", f"out={tmp_path / 'val.csv'}"],
        *([*on_photos, *BACKENDS[out.stem], f"out={out}"] for out in outs),
    )
    assert not any("not writable" in text for text in printed)
    # The very digits that the run validated with, now as files.
    expected = table(tmp_path / "val.csv")
    for out in outs:
        whole = [row for row in table(out) if not row["error"]]
        assert len(whole) == 100
        for row in whole:
            other = expected[int(Path(row["path"]).stem)]
            assert row["prediction"] == other["prediction"]
            assert float(row["probability"]) == pytest.approx(float(other["probability"]), abs=1e-4)


def test_a_restorer_writes_images(tmp_path) -> None:
    pytest.importorskip("tasks.restoration")
    pytest.importorskip("models.nafnet")
    random, run, pairs = np.random.default_rng(0), tmp_path / "run", tmp_path / "pairs"
    for number in range(12):
        name = f"scene/{number:02d}.{'jpg' if number else 'png'}"
        for folder in (pairs / "input", pairs / "target", tmp_path / "photos"):
            (folder / "scene").mkdir(parents=True, exist_ok=True)
            small = random.integers(0, 255, (4, 6, 3), np.uint8)
            Image.fromarray(small).resize((48, 32)).save(folder / name)
    (tmp_path / "photos" / "scene" / "07.jpg").write_bytes(b"no image")
    data = ["data=pairs", f"data.root={pairs}", f"data.cache_dir={tmp_path}", "data.val_count=3"]
    restorer = ["model=nafnet", "model.kwargs.width=4", "task=restoration", "data.crop=[16,16]"]
    short = ["global_batch_size=4", "log.images=0", "epochs=1", "optimizer.warmup_epochs=0"]
    use = ["predict.py", f"run={run}", f"data.root={tmp_path / 'photos'}"]
    one, two, cropped = tmp_path / "one", tmp_path / "two", tmp_path / "cropped"
    answers = answers_to(
        [
            ["train.py", f"output_dir={run}", *data, *restorer, *short],
            [*use, f"out={cropped}"],
            [*use, "data.crop=null", f"out={one}"],
            [*use, "data.crop=null", f"out={tmp_path / 'run/../photos'}"],
            [
                "export.py",
                f"run={run}",
                "format=torch",
                "data.crop=[32,48]",
                f"out={run}.pt2",
            ],  # part: export
        ],
        tmp_path,
    )
    assert [code for code, _ in answers[:4]] == [0, 0, 0, 2], answers
    assert "data.root" in answers[3][1]  # whose images would be replaced
    run_all(tmp_path, [*use, "data.crop=null", f"out={two}"], num_ranks=2)
    rows = table(one / "predictions.csv")
    assert list(rows[0]) == ["path", "image", "error"]
    assert [bool(row["error"]) for row in rows] == [number == 7 for number in range(12)]
    assert [row["image"] for row in rows if not row["error"]] == [
        str(one / "scene" / f"{number:02d}.{'jpg.png' if number else 'png'}")
        for number in range(12)
        if number != 7
    ]
    for row in rows:
        if row["error"]:
            continue
        file = Path(row["image"]).relative_to(one)
        image, other = (np.asarray(Image.open(out / file)).astype(int) for out in (one, two))
        assert image.shape == (32, 48, 3)
        assert Image.open(cropped / file).size == (16, 16)
        assert abs(image - other).max() <= 1
        # After one epoch the net corrects little: it is the image, not noise or a black square.
        assert abs(np.asarray(Image.open(row["path"]).convert("RGB")) - image).mean() < 30
    assert not (two / "scene" / "07.jpg.png").exists()
    program, _ = program_of(tmp_path / "run.pt2")  # part: export
    answer = program(np.array(Image.open(rows[0]["path"])))  # part: export
    assert (
        abs(answer - np.array(Image.open(rows[0]["image"])) / 255).max() < 0.6 / 255
    )  # part: export


@pytest.mark.parametrize(
    ("task", "columns", "kind"),
    [
        ("multilabel", ["image", "light", "shade"], "several labels"),
        ("regression", ["label"], "numbers"),
    ],
)
def test_several_labels_and_numbers_are_columns(
    tmp_path, task: str, columns: list[str], kind: str
) -> None:
    """A table of images, some lighter than others."""
    pytest.importorskip(f"tasks.{task}")
    root, lines, is_number = tmp_path / "images", ["path,label"], task == "regression"
    root.mkdir()
    for number in range(24):
        image = np.full((16, 16, 3), 10 * number, np.uint8)
        image[:8] //= 1 + number % 2
        Image.fromarray(image).save(root / f"{number:02d}.png")
        names = [name for name, has in [("light", number > 11), ("shade", number % 2)] if has]
        lines.append(
            f"{number:02d}.png,{number / 24 if is_number else ';'.join([*names, 'image'])}"
        )
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    data = ["data=table", f"data.root={root}", f"data.table={tmp_path / 'labels.csv'}"]
    data += [f"data.cache_dir={tmp_path}", "data.crop=[16,16]", "data.resize=null"]
    options = [*SMALL, *data, f"task={task}", "data.val_count=5", "global_batch_size=4", "epochs=4"]
    options += [] if is_number else ["loss.weights=auto"]  # part: loss_weights
    run, val, out = tmp_path / "run", tmp_path / "val.csv", tmp_path / "all.csv"
    _, printed, *_ = run_all(
        tmp_path,
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={val}"],
        ["predict.py", f"run={run}", f"data.root={root}", f"out={out}"],
        ["export.py", f"run={run}", "format=torch", f"out={run}.pt2"],  # part: export
    )
    metrics = metrics_in(printed)
    assert metrics == summary_of(run)["best"]
    rows = {row["path"]: row for row in table(out)}
    assert len(rows) == 24
    program, target = program_of(tmp_path / "run.pt2")  # part: export
    assert target["kind"] == kind  # part: export
    for row in table(val):
        assert list(row) == ["path", *columns, "error"]
        numbers, again = ([float(r[name]) for name in columns] for r in (row, rows[row["path"]]))
        assert again == pytest.approx(numbers, abs=1e-4)
        assert is_number or all(0 <= number <= 1 for number in numbers)
        answer = program(np.array(Image.open(row["path"])))  # part: export
        assert answer == pytest.approx(numbers, abs=1e-4)  # part: export
    if is_number:
        errors = [abs(float(r["label"]) - int(Path(r["path"]).stem) / 24) for r in table(val)]
        assert np.mean(errors) == pytest.approx(metrics["val/mae"], abs=1e-4)


def test_masks_are_written_as_indices_in_colours(tmp_path) -> None:
    """A run on the middle of images that are bright where their masks are 2, dark elsewhere."""
    pytest.importorskip("tasks.segmentation")
    pytest.importorskip("models.unet")
    random, run, scenes = np.random.default_rng(0), tmp_path / "run", tmp_path / "scenes"
    for number in range(12):
        mask = 2 * random.integers(0, 2, (9, 10), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        image = (100 * mask[..., None] + random.integers(0, 50, (36, 40, 3))).astype(np.uint8)
        for kind, array in [("images", image), ("masks", mask)]:
            path = scenes / kind / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    data = ["data=masks", f"data.root={scenes}", f"data.cache_dir={tmp_path}", "data.crop=[24,32]"]
    data += ["data.val_count=4", "global_batch_size=4"]
    data += ["loss.weights=auto"]  # part: loss_weights
    unet = ["task=segmentation", "model=unet", "model.kwargs.width=4", "model.kwargs.num_levels=2"]
    short = ["epochs=3", "optimizer.warmup_epochs=0", "optimizer.lr=0.01", "log.images=0"]
    val, again = tmp_path / "val", tmp_path / "again"
    _, printed, *_ = run_all(
        tmp_path,
        ["train.py", f"output_dir={run}", *data, *unet, *short],
        ["predict.py", f"run={run}", f"out={val}", "split=val"],
        ["predict.py", f"run={run}", f"out={again}", f"data.root={scenes / 'images'}"],
        ["export.py", f"run={run}", "format=torch", f"out={run}.pt2"],  # part: export
    )
    metrics, right = metrics_in(printed), []
    assert metrics == summary_of(run)["best"]
    assert len(list(again.glob("*.png"))) == 12
    program, target = program_of(tmp_path / "run.pt2")  # part: export
    assert target["kind"] == "masks"  # part: export
    for row in table(val / "predictions.csv"):
        assert list(row) == ["path", "image", "error"]
        picture = Image.open(row["image"])
        assert (picture.mode, picture.size) == ("P", (32, 24))
        assert picture.getpalette()[:9] == palette(3).flatten().tolist()  # type: ignore[index]
        image, mask = np.asarray(picture), Image.open(row["path"].replace("images", "masks"))
        right.append(image == np.asarray(mask)[6:30, 4:36])
        assert np.mean(np.asarray(Image.open(again / Path(row["path"]).name)) == image) > 0.99
        answer = program(np.array(Image.open(row["path"]))[6:30, 4:36])  # part: export
        np.testing.assert_allclose(answer.sum(axis=-1), 1, rtol=1e-5)  # part: export
        assert np.mean(answer.argmax(axis=-1) == image) > 0.99  # part: export
    assert len(right) == 4
    assert np.mean(right) == pytest.approx(metrics["val/pixel_accuracy"])


def test_the_names_of_the_classes_travel_with_the_run_from_its_first_step_on(run, tmp_path) -> None:
    expected = sorted(NAMES)
    assert json.loads((run / "run.json").read_text())["classes"] == expected
    with safe_open(run / "checkpoints" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["classes"]) == expected
    assert json.loads(metadata["target"]) == {"kind": "labels", "classes": expected}
    assert json.loads(metadata["in_channels"]) == 3
    facts = checkpoint_of(run)["facts"]
    assert (facts["classes"], facts["precision"]) == (expected, "float32")

    failing = [*SMALL, "optimizer.lr=1e30", "max_bad_steps=1", "log.every_steps=1"]
    [(code, _)] = answers_to([["train.py", f"output_dir={tmp_path / 'run'}", *failing]], tmp_path)
    assert code == 2
    started = json.loads((tmp_path / "run" / "run.json").read_text())
    assert started["classes"] == list("0123456789")


MISTAKES = {  # what is wrong, and what the message names
    "run=outputs/nowhere": "run=outputs/nowhere",
    "data.root=nowhere": "data.root=nowhere",
    "split=test": "split=test",
    "": "data.root=",
    "split=val data.hflop=1": "data.hflop=1",
    "split=val epochs=many": "epochs=many",
    "split=val model.kwargs.width=16": "model.kwargs",
    "data.root=data loader=synthetic": "loader=pytorch",
    "data.root=runtime": "data.root=runtime",
    "out": "key=value",
    "out=": "out=",
}
DAMAGED = [  # files of a run
    ("predict.py", "split=val", "run.json", "[]"),
    ("predict.py", "split=val", "config.yaml", "data: {root: 'http://host/${oc.env:PATH}'}"),
    ("export.py", "format=onnx", "config.yaml", "[1"),
]
OTHER_CLASSES = [("predict.py", "split=val"), ("export.py", "format=safetensors")]


def test_mistakes_damaged_files_and_other_classes_end_in_a_few_lines_that_name_them(
    run, digits, photos, tmp_path
) -> None:
    out, commands, expected = tmp_path / "out", [], list(MISTAKES.values())
    for line in MISTAKES:
        given = [] if line == "out=" else [f"out={out}", *line.split()]
        commands.append(["predict.py", f"run={run}", *given])
    for number, (script, option, file, content) in enumerate(DAMAGED):
        copy = shutil.copytree(run, tmp_path / str(number))
        (copy / file).write_text(content)
        commands.append([script, f"run={copy}", f"out={out}", option])
        expected.append(str(copy / file))
    root = shutil.copytree(digits, tmp_path / "digits", copy_function=os.link)
    for split in ("train", "val"):  # as many classes as before, in another order
        (root / split / "eight").rename(root / split / "zzz")
    data = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    for script, option in OTHER_CLASSES:
        commands.append([script, f"run={run}", *data, f"out={out}", option])
        expected.append("output 0: eight then, five now")
    # Without the best weights, the newest checkpoint is used.
    copy = shutil.copytree(run, tmp_path / "newest")
    (copy / "checkpoints" / "model.safetensors").unlink()
    rest = ["predict.py", f"run={copy}", f"data.root={photos[0]}", f"out={tmp_path / 'out.csv'}"]
    *answers, (code, printed) = answers_to([*commands, rest], tmp_path)
    for command, message, (status, text) in zip(commands, expected, answers, strict=True):
        assert status == 2, command
        assert message in text, command
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 3, text
    assert not out.exists()
    assert code == 0
    assert Path(printed.rpartition("weights: ")[2].strip()).match("step-*.pt")
