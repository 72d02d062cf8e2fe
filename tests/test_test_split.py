"""`predict.py split=test` evaluates the test split, whose samples training has not seen."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from loaders.prediction import build_test_loader
from tests.helpers import answers_to, make_config, refused, run_all, summary_of
from tests.images import digit_folders, make_photos, photos_in, reading
from tests.parts import rows_of

CPU = torch.device("cpu")
SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]


def test_a_run_is_tested_on_any_number_of_ranks(tmp_path: Path) -> None:
    """As on a copy of the data whose validation split is the test split."""
    root, copy, run = tmp_path / "digits", tmp_path / "copy", tmp_path / "run"
    digit_folders(root, range(4), 60, 30)
    digit_folders(tmp_path / "more", range(4), 50, 0)
    shutil.copytree(tmp_path / "more" / "train", root / "test")
    shutil.copytree(root / "train", copy / "train")
    shutil.copytree(root / "test", copy / "val")
    data = ["data=imagefolder", *reading(root), "data.resize=null", "data.crop=28"]
    use = ["predict.py", f"run={run}"]
    test, val = tmp_path / "test.csv", tmp_path / "val.csv"
    train = ["train.py", f"output_dir={run}", *data, *SMALL, "loss.weights=auto"]
    same = [*use, "split=val", f"data.root={copy}", f"out={val}"]
    _, printed, _ = run_all([train, [*use, "split=test", f"out={test}"], same], tmp_path)
    metrics, expected = (
        json.loads(path.with_suffix(".metrics.json").read_text()) for path in (test, val)
    )
    assert list(metrics) == ["test/loss", "test/top1"]
    assert [*metrics.values()] == [*expected.values()]
    assert json.dumps(metrics) in printed
    assert test.read_text().count("/test/") == 4 * 50
    assert not any("test" in name for name in summary_of(run))
    [(code, text)] = answers_to([[*use, "split=val", "data.split_seed=1", f"out={val}"]], tmp_path)
    assert (code, "data.split_seed=1" in text) == (2, True)
    for num_ranks in rows_of("NUMBERS_OF_RANKS"):
        again = tmp_path / f"{num_ranks}.csv"
        run_all([[*use, "split=test", f"out={again}"]], tmp_path, num_ranks)
        same = json.loads(again.with_suffix(".metrics.json").read_text())
        assert same == pytest.approx(metrics, abs=1e-6)
        assert again.read_text() == test.read_text()


def test_data_without_a_test_split_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for split, count in (("train", 9), ("val", 3), ("test", 6)):
        make_photos(root / split, count)
    options = photos_in(root)
    remote = "data.root=http://host/photos"
    for more in ([remote], *rows_of("WITHOUT_TEST_SPLIT")):
        with refused("split=test", more[0].replace("loader=", "loader.name="), "loader=pytorch"):
            build_test_loader(make_config(*options, *more), None, CPU)
    with refused("split=test", "mnist_mini"):
        build_test_loader(make_config(), None, CPU)
    shutil.rmtree(root / "test")
    with refused("split=test", str(root)):
        build_test_loader(make_config(*options), None, CPU)
