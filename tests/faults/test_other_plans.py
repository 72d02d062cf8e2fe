"""Resuming with other data."""

import shutil

from tests.faults import NUM_STEPS
from tests.helpers import answers_to, checkpoint_of


def test_other_data_is_refused_unless_the_epoch_may_start_again(options, photos, tmp_path) -> None:
    """A run that was started again goes on where it was, not where it branched off."""
    stopped, branch = tmp_path / "stopped", tmp_path / "branch"
    more, renamed = tmp_path / "more" / photos.name, tmp_path / "renamed" / photos.name
    for root in (more, renamed):
        shutil.copytree(photos, root)
    photo = next(more.glob("train/digit 0/*.png"))
    shutil.copy(photo, photo.with_name("new.png"))
    for split in renamed.iterdir():
        (split / "digit 0").rename(split / "digit 9")
    fresh = ["checkpoint.fresh_epoch=true", "epochs=1"]
    other = "made with other data or settings ("
    rows: list[tuple[str, list[str], int, str]] = [
        ("stopped", ["max_steps=3"], 0, ""),
        ("seed", ["seed=1"], 2, f"{other}seed: 0 then, 1 now)"),
        ("more", [f"data.root={more}"], 2, f"{other}files: "),
        ("renamed", [f"data.root={renamed}", *fresh], 2, "output 0: digit 0 then, digit 1 now"),
        ("fresh", [f"data.root={more}", *fresh], 0, "plan of the data: epoch 1 is restarted"),
        ("branch", ["max_steps=5"], 0, f"resumed from {stopped}"),
        ("branch", ["max_steps=7"], 0, f"resumed from {branch}"),
    ]
    commands = [
        ["train.py", *options, f"output_dir={tmp_path}/{name}", *overrides]
        + [f"resume={stopped}"] * (name != "stopped")
        for name, overrides, _, _ in rows
    ]
    told = answers_to(commands, tmp_path)
    for (name, _, expected, message), (code, text) in zip(rows, told, strict=True):
        assert code == expected, f"{name}: {text}"
        assert message in text, f"{name}: {text}"
        assert ("checkpoint.fresh_epoch=true" in text) == (other in message), name
        assert "Traceback" not in text
    for name, step in {"fresh": NUM_STEPS // 2, "branch": 7}.items():
        assert checkpoint_of(tmp_path / name)["step"] == step
    assert (branch / "checkpoints" / "model.safetensors").exists()  # of its own best epoch
