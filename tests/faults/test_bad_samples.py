"""Bad samples of a run are counted over all ranks and over a resume."""

import shutil
from pathlib import Path

import pytest

from tests.faults import run_to_end
from tests.helpers import summary_of

HTML = b"<html>404 not found</html>"


@pytest.fixture
def data(photos, tmp_path) -> Path:
    """Of the training images one has no header, and four are cut short."""
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    images = sorted((root / "train").rglob("*.jpg"))
    images[0].write_bytes(HTML)
    for path in images[10:14]:
        path.write_bytes(path.read_bytes()[:-200])
    return root


def test_bad_samples_are_counted_over_ranks_and_a_resume(options, data, tmp_path) -> None:
    script, run = "train_ddp.py", tmp_path / "run"
    options = [*options, f"data.root={data}", "data.on_error=skip", "resume=auto", "epochs=3"]
    for last_step in (5, 14):
        codes, texts = run_to_end(script, run, *options, f"max_steps={last_step}")
        assert set(codes) == {0}, texts
    assert summary_of(run)["bad_samples"] == {"train": 5, "val": 0}

    # Each rank has met fewer of them, and so has each part of the run.
    codes, texts = run_to_end(script, run, *options, "data.max_bad_samples=4")
    assert set(codes) == {2}, texts
    assert all("5 samples of photos/train are bad, more than data.max" in text for text in texts)
    assert "Traceback" not in "".join(texts)
