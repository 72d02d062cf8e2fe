"""`predict.py` uses what a run has trained."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tasks.palette import palette
from tests.helpers import (
    ENVIRONMENT,
    FORKSERVER,
    REPOSITORY,
    _run,
    answers_to,
    checkpoint_of,
    free_port,
    summary_of,
    train,
)
from tests.torchrun import TWO_RANKS, torchrun

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
HAS_DALI = sys.platform == "linux"


def use(script: str, folder: Path, *arguments: str, num_ranks: int = 0) -> str:
    """What a script printed, run by itself or by so many ranks; RuntimeError if it failed."""
    processes, prints = [], []
    port = free_port()
    for rank in range(num_ranks or 1):
        env = dict(ENVIRONMENT)
        if num_ranks:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        prints.append(folder / f"{script}-{rank}-of-{num_ranks}.txt")
        process = FORKSERVER.Process(
            target=_run, args=(REPOSITORY, [script, *arguments], env, prints[-1])
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(240)
    texts = [path.read_text() for path in prints]
    if any(process.exitcode for process in processes):
        raise RuntimeError("\n".join(texts))
    return texts[0]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder of digits below folders, and what they are in the order of the files."""
    root = tmp_path_factory.mktemp("photos")
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        images, labels = arrays["val_images"][:101], arrays["val_labels"][:101]
    for number, image in enumerate(images):
        folder = root / f"part {number // 40}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03d}.png")
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
    cache = f"data.cache_dir={folder.parent / 'cache'}"
    train("train.py", folder, *SMALL, *data, cache, "epochs=3", "global_batch_size=50")
    return folder


@pytest.fixture(scope="module")
def predicted(run: Path, photos) -> list[dict[str, str]]:
    """The table of predictions on the photos."""
    out = run.parent / "predictions.csv"
    said = use("predict.py", run.parent, f"run={run}", f"data.root={photos[0]}", f"out={out}")
    assert "101 images, 0 of them broken" in said
    return table(out)


def test_a_folder_of_images_becomes_a_table_with_class_names(photos, predicted) -> None:
    root, truth = photos
    rows = predicted
    assert list(rows[0]) == [
        *("path", "prediction", "probability"),
        *(f"{what}{i}" for i in range(2, 6) for what in ("top", "probability")),
        "error",
    ]
    assert [row["path"] for row in rows] == sorted(map(str, root.rglob("*.png")))
    right = [row["prediction"] == label for row, label in zip(rows, truth, strict=True)]
    assert np.mean(right) > 0.6
    for row in rows:
        shares = [float(row[key]) for key in row if key.startswith("probability")]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.00001
        classes = [row["prediction"], *(row[f"top{i}"] for i in range(2, 6))]
        assert len(set(classes) & set(NAMES)) == 5


@pytest.mark.parametrize(
    "overrides",
    [["loader.num_workers=1"], ["loader=dali"]],
    ids=lambda overrides: overrides[0],
)
def test_any_backend_gives_the_same_table(
    run, photos, predicted, tmp_path, overrides: list[str]
) -> None:
    if "dali" in overrides[0]:
        pytest.importorskip("nvidia.dali")
    where = [f"run={run}", f"data.root={photos[0]}", f"out={tmp_path / 'other.csv'}"]
    use("predict.py", tmp_path, *where, *overrides)
    for one, other in zip(predicted, table(tmp_path / "other.csv"), strict=True):
        assert one["path"] == other["path"]
        # DALI's resizing rounds differently.
        assert float(one["probability"]) == pytest.approx(float(other["probability"]), abs=0.02)


def test_two_ranks_write_the_same_file_as_one_process_also_with_broken_files(
    run, photos, tmp_path
) -> None:
    root, _ = photos
    mixed = tmp_path / "mixed"
    subprocess.run(["cp", "-r", str(root), str(mixed)], check=True)
    whole = (mixed / "part 1" / "050.png").read_bytes()
    (mixed / "part 1" / "050.png").write_bytes(whole[: len(whole) // 2])
    (mixed / "part 0" / "note.jpg").write_text("no image")
    (mixed / "part 2" / "100b.jpg").write_bytes(b"")
    where = [f"run={run}", f"data.root={mixed}", f"data.cache_dir={tmp_path}"]
    said = use("predict.py", tmp_path, *where, f"out={tmp_path / 'one.csv'}")
    assert "103 images, 3 of them broken" in said
    use("predict.py", tmp_path, *where, f"out={tmp_path / 'two.csv'}", num_ranks=2)
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    rows = {Path(row["path"]).name: row for row in table(tmp_path / "one.csv")}
    paths = [row["path"] for row in rows.values()]
    assert paths == sorted(paths)
    assert rows["note.jpg"]["error"] == "not an image"
    assert rows["100b.jpg"]["error"]
    assert "050.png cannot be decoded" in rows["050.png"]["error"]
    for name, row in rows.items():
        is_broken = name in ("note.jpg", "100b.jpg", "050.png")
        assert bool(row["error"]) == is_broken == (row["prediction"] == "")


def test_torchrun_starts_it_with_a_backend_that_meets_a_broken_file(run, photos, tmp_path) -> None:
    loader = "dali" if HAS_DALI else "pytorch"
    root = tmp_path / "photos"
    shutil.copytree(photos[0], root)
    whole = (root / "part 1" / "050.png").read_bytes()
    (root / "part 1" / "050.png").write_bytes(whole[: len(whole) // 2])
    out, prints = tmp_path / "predictions.csv", tmp_path / "prints.txt"
    arguments = [f"run={run}", f"data.root={root}", f"out={out}", f"loader={loader}"]
    arguments = [*TWO_RANKS, "predict.py", *arguments, f"data.cache_dir={tmp_path}"]
    process = torchrun(arguments, REPOSITORY, prints)
    process.join(240)
    assert process.exitcode == 0, prints.read_text()
    assert prints.read_text().count("101 images, 1 of them broken") == 1
    assert [row["path"] for row in table(out) if row["error"]] == [str(root / "part 1" / "050.png")]
    assert len(table(out)) == 101


@pytest.mark.parametrize("script", ["train_amp.py", "train_ema.py", "train_ddp.py"])
def test_the_validation_split_gives_the_runs_metrics_to_the_last_digit(tmp_path, script) -> None:
    folder = tmp_path / "run"
    train(script, folder, *SMALL, "max_steps=30")
    num_ranks = 2 if "ddp" in script else 0
    arguments = [f"run={folder}", "split=val", f"out={tmp_path / 'val.csv'}"]
    said = use("predict.py", tmp_path, *arguments, num_ranks=num_ranks)
    metrics = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    summary = summary_of(folder)
    assert metrics == summary["best"]
    assert metrics == {key: summary[key] for key in metrics}
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        labels = arrays["val_labels"]
    rows = table(tmp_path / "val.csv")
    assert len(rows) == 2000
    right = [int(row["prediction"]) == label for row, label in zip(rows, labels, strict=True)]
    assert np.mean(right) == metrics["val/top1"]


def test_photos_become_grey_for_a_model_of_grey_digits(photos, tmp_path) -> None:
    root, _ = photos
    folder, out = tmp_path / "run", tmp_path / "predictions.csv"
    train("train.py", folder, *SMALL)
    arguments = [f"run={folder}", f"data.cache_dir={tmp_path}", "split=val", f"out={out}"]
    use("predict.py", tmp_path, *arguments)
    expected = table(out)[:101]
    arguments = [*arguments[:2], f"data.root={root}", f"out={out}"]
    backends: list[list[str]] = [[], ["loader=dali"]] if HAS_DALI else [[]]
    for loader in backends:
        assert "not writable" not in use("predict.py", tmp_path, *arguments, *loader)
        # The very digits that the run validated with, now as files.
        for row, other in zip(table(out), expected, strict=True):
            assert row["prediction"] == other["prediction"]
            assert float(row["probability"]) == pytest.approx(float(other["probability"]), abs=1e-4)


def test_a_restorer_writes_images(tmp_path) -> None:
    pytest.importorskip("tasks.restoration")
    pytest.importorskip("models.nafnet")
    random = np.random.default_rng(0)
    for name in ("input", "target"):
        for number in range(12):
            path = (
                tmp_path / "pairs" / name / "scene" / f"{number:02d}.{'jpg' if number else 'png'}"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            small = random.integers(0, 255, (4, 6, 3), np.uint8)
            Image.fromarray(small).resize((48, 32)).save(path)
    folder = tmp_path / "run"
    data = ["data=pairs", f"data.root={tmp_path / 'pairs'}", "data.crop=[16,16]"]
    data += [f"data.cache_dir={tmp_path}", "global_batch_size=4", "log.images=0"]
    restorer = ["model=nafnet", "model.kwargs.width=4", "task=restoration"]
    train("train.py", folder, *data, *restorer, "epochs=1", "optimizer.warmup_epochs=0")
    inputs = tmp_path / "pairs" / "input"
    (inputs / "scene" / "07.jpg").write_bytes(b"no image")
    arguments = [f"run={folder}", f"data.root={inputs}", "data.crop=null"]
    one, two = tmp_path / "one", tmp_path / "two"
    use("predict.py", tmp_path, *arguments, f"out={one}")
    use("predict.py", tmp_path, *arguments, f"out={two}", num_ranks=2)
    names = [
        f"{number:02d}.{'jpg.png' if number else 'png'}" for number in range(12) if number != 7
    ]
    assert sorted(path.name for path in (one / "scene").iterdir()) == names
    for name in names:
        with Image.open(one / "scene" / name) as image, Image.open(two / "scene" / name) as other:
            assert image.size == (48, 32)
            difference = np.asarray(image).astype(int) - np.asarray(other)
            assert abs(difference).max() <= 1
        # After one epoch the net corrects little: it is the image, not noise or a black square.
        with Image.open(inputs / "scene" / name.replace(".jpg.png", ".jpg")) as source:
            assert (
                abs(np.asarray(source.convert("RGB")).astype(int) - np.asarray(image)).mean() < 30
            )
    rows = table(one / "predictions.csv")
    assert list(rows[0]) == ["path", "image", "error"]
    assert [bool(row["error"]) for row in rows] == [number == 7 for number in range(12)]
    assert rows[1]["image"] == str(one / "scene" / "01.jpg.png")
    with pytest.raises(RuntimeError, match="is data.root, whose images would be replaced"):
        use("predict.py", tmp_path, *arguments, f"out={inputs}/../input")
    said = use("predict.py", tmp_path, *arguments[:2], f"out={tmp_path / 'cropped'}")
    assert "12 images, 1 of them broken" in said


def run_on_labels(tmp_path: Path, task: str) -> tuple[Path, Path]:
    """A short run on a table of images, some lighter than others, and its folder of images."""
    pytest.importorskip(f"tasks.{task}")
    root, lines = tmp_path / "images", ["path,label"]
    root.mkdir()
    for number in range(24):
        image = np.full((16, 16, 3), 10 * number, np.uint8)
        image[:8] //= 1 + number % 2
        Image.fromarray(image).save(root / f"{number:02d}.png")
        names = [name for name, has in [("light", number > 11), ("shade", number % 2)] if has]
        label = number / 24 if task == "regression" else ";".join([*names, "image"])
        lines.append(f"{number:02d}.png,{label}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    data = ["data=table", f"data.root={root}", f"data.table={tmp_path / 'labels.csv'}"]
    data += [f"data.cache_dir={tmp_path}", "data.crop=[16,16]", "data.resize=null"]
    weights = ["loss.weights=auto"] if task == "multilabel" else []
    options = [f"task={task}", "data.val_count=5", "global_batch_size=4", "epochs=4", *weights]
    train("train.py", tmp_path / "run", *SMALL, *data, *options)
    return tmp_path / "run", root


@pytest.mark.parametrize(
    ("task", "columns"),
    [("multilabel", ["image", "light", "shade"]), ("regression", ["label"])],
)
def test_several_labels_and_numbers_are_columns(tmp_path, task: str, columns: list[str]) -> None:
    run, root = run_on_labels(tmp_path, task)
    val, out = tmp_path / "val.csv", tmp_path / "all.csv"
    said = use("predict.py", tmp_path, f"run={run}", "split=val", f"out={val}")
    metrics = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert metrics == summary_of(run)["best"]
    use("predict.py", tmp_path, f"run={run}", f"data.root={root}", f"out={out}")
    rows = {row["path"]: row for row in table(out)}
    assert len(rows) == 24
    for row in table(val):
        assert list(row) == ["path", *columns, "error"]
        numbers, again = ([float(r[name]) for name in columns] for r in (row, rows[row["path"]]))
        assert again == pytest.approx(numbers, abs=1e-4)
        assert task == "regression" or all(0 <= number <= 1 for number in numbers)
    if task == "regression":
        errors = [abs(float(r["label"]) - int(Path(r["path"]).stem) / 24) for r in table(val)]
        assert np.mean(errors) == pytest.approx(metrics["val/mae"], abs=1e-4)


def run_on_masks(tmp_path: Path) -> Path:
    """A short run on the middle of images that are bright where their masks are 2, dark elsewhere."""
    pytest.importorskip("tasks.segmentation")
    pytest.importorskip("models.unet")
    random = np.random.default_rng(0)
    for number in range(12):
        mask = 2 * random.integers(0, 2, (9, 10), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        image = (100 * mask[..., None] + random.integers(0, 50, (36, 40, 3))).astype(np.uint8)
        for kind, array in [("images", image), ("masks", mask)]:
            path = tmp_path / "scenes" / kind / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    data = ["data=masks", f"data.root={tmp_path / 'scenes'}", f"data.cache_dir={tmp_path}"]
    data += ["data.crop=[24,32]", "data.val_count=4", "global_batch_size=4", "loss.weights=auto"]
    unet = ["task=segmentation", "model=unet", "model.kwargs.width=4", "model.kwargs.num_levels=2"]
    short = ["epochs=3", "optimizer.warmup_epochs=0", "optimizer.lr=0.01", "log.images=0"]
    train("train.py", tmp_path / "run", *data, *unet, *short)
    return tmp_path / "run"


def test_masks_are_written_as_indices_in_colours(tmp_path) -> None:
    run, out = run_on_masks(tmp_path), tmp_path / "masks"
    arguments = [f"run={run}", f"out={out}"]
    said = use("predict.py", tmp_path, *arguments, "split=val")
    metrics = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert metrics == summary_of(run)["best"]
    right = []
    for row in table(out / "predictions.csv"):
        assert list(row) == ["path", "image", "error"]
        with Image.open(row["image"]) as image:
            assert (image.mode, image.size) == ("P", (32, 24))
            assert image.getpalette()[:9] == palette(3).flatten().tolist()  # type: ignore[index]
            mask = np.asarray(Image.open(row["path"].replace("images", "masks")))
            right.append(np.asarray(image) == mask[6:30, 4:36])
    assert len(right) == 4
    assert np.mean(right) == pytest.approx(metrics["val/pixel_accuracy"])
    inputs, again = tmp_path / "scenes" / "images", tmp_path / "again"
    use("predict.py", tmp_path, f"run={run}", f"data.root={inputs}", f"out={again}")
    assert len(list(again.glob("*.png"))) == 12
    for row in table(out / "predictions.csv"):
        file = again / Path(row["path"]).name
        assert np.mean(np.asarray(Image.open(file)) == np.asarray(Image.open(row["image"]))) > 0.99


def test_the_names_of_the_classes_travel_with_the_run(run) -> None:
    expected = sorted(NAMES)
    assert json.loads((run / "run.json").read_text())["classes"] == expected
    with safe_open(run / "checkpoints" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["classes"]) == expected
    assert json.loads(metadata["target"]) == {"kind": "labels", "classes": expected}
    assert json.loads(metadata["in_channels"]) == 3
    assert checkpoint_of(run)["facts"]["classes"] == expected


def test_the_class_names_are_there_before_the_first_step(tmp_path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(AssertionError):
        train(
            "train.py", folder, *SMALL, "optimizer.lr=1e30", "max_bad_steps=1", "log.every_steps=1"
        )
    assert json.loads((folder / "run.json").read_text())["classes"] == list("0123456789")


def test_without_best_weights_the_newest_checkpoint_is_used(run, photos, tmp_path) -> None:
    root, _ = photos
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(run), str(folder)], check=True)
    (folder / "checkpoints" / "model.safetensors").unlink()
    out = tmp_path / "predictions.csv"
    said = use("predict.py", tmp_path, f"run={folder}", f"data.root={root}", f"out={out}")
    assert "weights: " in said
    assert Path(said.rpartition("weights: ")[2].strip()).match("step-*.pt")
    saved = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    assert saved["facts"]["precision"] == "float32"


@pytest.mark.parametrize("script", ["predict.py", "export.py"])
def test_classes_of_other_names_are_refused(run, digits, tmp_path, script: str) -> None:
    root, out = tmp_path / "digits", tmp_path / "out"
    shutil.copytree(digits, root, copy_function=os.link)
    for split in ("train", "val"):  # as many classes as before, in another order
        (root / split / "eight").rename(root / split / "zzz")
    arguments = [f"run={run}", f"data.root={root}", f"data.cache_dir={tmp_path}", f"out={out}"]
    how = ["split=val"] if script == "predict.py" else ["format=safetensors"]
    with pytest.raises(RuntimeError, match="output 0: eight then, five now") as raised:
        use(script, tmp_path, *arguments, *how)
    assert "Traceback" not in str(raised.value)
    assert not out.exists()


MISTAKES = {
    "run=outputs/nowhere": "run=outputs/nowhere is not the folder of a run: there is no",
    "data.root=nowhere": "data.root=nowhere is not a folder",
    "split=test": "split=test is unknown; use split=val",
    "": "data.root= is missing; give the folder of the images, or split=val",
    "split=val data.hflop=1": "data.hflop=1 does not fit the configuration",
    "split=val epochs=many": "epochs=many does not fit the configuration",
    "split=val model.kwargs.width=16": "leave model.name and model.kwargs as they were",
    "data.root=data loader=synthetic": "reads no files; use loader=pytorch",
    "data.root=runtime": "data.root=runtime has no images; expected .jpg",
    "out": "out is not key=value",
    "out=": "out= missing",
}
DAMAGED = [  # files of a run
    ("predict.py", "split=val", "run.json", "[]"),
    ("predict.py", "split=val", "config.yaml", "data: {root: 'http://host/${oc.env:PATH}'}"),
    ("export.py", "format=onnx", "config.yaml", "[1"),
]


def test_mistakes_and_damaged_files_end_in_a_few_lines_that_name_them(run, tmp_path) -> None:
    out, commands, expected = tmp_path / "out", [], list(MISTAKES.values())
    for line in MISTAKES:
        given = [] if line == "out=" else [f"out={out}", *line.split()]
        commands.append(["predict.py", f"run={run}", *given])
    for number, (script, option, file, content) in enumerate(DAMAGED):
        copy = shutil.copytree(run, tmp_path / str(number))
        (copy / file).write_text(content)
        commands.append([script, f"run={copy}", f"out={out}", option])
        expected.append(str(copy / file))
    answers = answers_to(commands, tmp_path)
    for command, message, (code, said) in zip(commands, expected, answers, strict=True):
        assert code == 2, command
        assert message in said, command
        assert "Traceback" not in said
        assert len(said.strip().splitlines()) <= 3, said
    assert not out.exists()
