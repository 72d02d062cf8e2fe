"""`data=huggingface` trains on a data set of Hugging Face that was written to a folder."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image

from loaders import build_loaders
from tests.helpers import make_config, refused
from tests.processes import train
from tests.results import summary_of

OPTIONS = ["data=huggingface", "model=small_cnn", "data.resize=32", "data.crop=28"]
OPTIONS += ["global_batch_size=4", "max_steps=3", "loader.num_workers=1"]
NAMES = ["cat", "dog"]
SIZES = [(40, 50), (36, 33), (64, 32)]


def rows(count: int, label: str = "label") -> datasets.Dataset:
    images = [Image.fromarray(np.full((*SIZES[n % 3], 3), 20 * n, np.uint8)) for n in range(count)]
    features = datasets.Features({"photo": datasets.Image(), label: datasets.ClassLabel(2, NAMES)})
    return datasets.Dataset.from_dict(
        {"photo": images, label: [n % 2 for n in range(count)]}, features
    )


def test_a_folder_without_a_test_split_trains(tmp_path: Path) -> None:
    datasets.DatasetDict(train=rows(12)).save_to_disk(tmp_path / "photos")
    run = tmp_path / "run"
    train("train.py", run, *OPTIONS, f"data.root={tmp_path / 'photos'}")
    assert summary_of(run)["val/loss"] > 0
    assert '"cat"' in (run / "run.json").read_text()


def build(*options: str) -> Any:
    return build_loaders(make_config(*OPTIONS, *options), torch.device("cpu"))


def test_keys_that_choose_validation_samples_act_or_are_refused(tmp_path: Path) -> None:
    options = [f"data.root={tmp_path}", "data.val_count=3"]
    datasets.DatasetDict(train=rows(12)).save_to_disk(tmp_path)
    assert build(*options)[0].info.num_val_samples == 3
    datasets.DatasetDict(train=rows(12), validation=rows(4)).save_to_disk(tmp_path)
    with refused("data.val_count=3"):
        build(*options)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    numbers = rows(4).cast_column("label", datasets.Value("int64"))
    datasets.DatasetDict(train=numbers, test=numbers).save_to_disk(tmp_path / "no classes")
    datasets.DatasetDict(test=rows(4)).save_to_disk(tmp_path / "no train")
    for folder, option, words in (
        ("no classes", "data.resize=32", "photo, label"),
        ("no train", "data.resize=32", "train"),
        ("no train/test", "data.resize=32", "data.root"),
        ("no train", "data.mean=null", "data.mean"),
    ):
        with refused(words):
            build(option, f"data.root='{tmp_path / folder}'")
