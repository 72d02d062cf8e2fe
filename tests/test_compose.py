"""Techniques merge into a user's own script, and edits of the baseline reach all scripts."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, SCRIPTS, commit, folder_with, replace
from tests.processes import without_reader
from tests.test_side_by_side import LARGEST
from tools.compose import BASELINE, compose, split, unmarked_lines

pytestmark = pytest.mark.slow

TECHNIQUES = [Path(name).stem.removeprefix("train_") for name in SCRIPTS if name.count("_") == 1]
EDITS = [  # a user's, in train.py
    ("import torch\n", "import torch\nimport torchvision\n"),
    ("inputs and targets\n", "inputs and targets\n            inputs = inputs.clone()\n"),
    ("targets)\n", "targets)\n\n            loss = loss + 0 * loss\n"),
    ("run.resume()\n", "run.resume()\n    print('goes on')\n"),
    ("callbacks\n", "callbacks\n    print('logs to', run.run_dir)\n"),
    ("task.num_outputs)\n", "task.num_outputs)\n    model = torch.nn.Sequential(model)\n"),
    ("loss, grad_norm)\n", "loss, grad_norm)\n            print('loss', float(loss))\n"),
    ("totals, shown)\n", "totals, shown)\n        print('validated', epoch)\n"),
    ("    )\n    run.resume()\n", "    )\n    print('on', device)\n    run.resume()\n"),
    ("loss = task.loss(", "loss = 2 * task.loss("),
    ("# forward\n", "# forward\n            targets = targets.clone()\n"),
]
HALVES = EDITS[::2], EDITS[1::2]  # without neighbours


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository with copies of the scripts, and one of a user's own."""
    folder_with(tmp_path, BASELINE)
    for path in REPOSITORY.glob("train_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "train_my_own.py").write_text("print('mine')\n")
    commit(tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, prints and errors of tools.compose, as a user runs it."""
    command = [sys.executable, "-m", "tools.compose", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_edits_of_the_baseline_are_brought_to_all_scripts_and_to_the_largest_sets(clone) -> None:
    """Some before they are committed, and some after that; a merge does not wait for either."""
    for edits, is_committed in zip(HALVES, (False, True), strict=True):
        for old, new in edits:
            replace(clone / BASELINE, old, new)
        if is_committed:
            commit(clone)
        _, edited = split((clone / BASELINE).read_text())
        for names in LARGEST:
            text = compose(list(names), folder=clone)
            assert all(text.count(new) == 1 for _, new in edits)
            # What the techniques changed before is what they change here, and nothing else.
            assert unmarked_lines(edited, split(text)[1]) == []
        status, printed, errors = run(clone, "--update")
        assert status == 0, errors
        for name in (*TECHNIQUES, "ddp_amp"):
            text = (clone / f"train_{name}.py").read_text()
            assert all(text.count(new) == 1 for _, new in edits)
            assert f"train_{name}.py follows train.py" in printed
        assert run(clone, "--update") == (0, "", "")
        commit(clone)
    text = (clone / "train_accumulate.py").read_text()  # the whole loss is divided
    assert text.index("loss + 0 * loss") < text.index("loss / parts.number")
    assert (clone / "train_my_own.py").read_text() == "print('mine')\n"


def test_a_conflict_is_settled_once_and_comes_back_only_with_an_edit_of_its_lines(
    clone: Path,
) -> None:
    baseline, amp, ddp_amp = (
        clone / name for name in (BASELINE, "train_amp.py", "train_ddp_amp.py")
    )
    before = {path: path.read_text() for path in (amp, ddp_amp)}
    replace(baseline, "outputs = model(inputs)", "outputs = model(inputs.clone())")
    status, _, errors = run(clone, "--update")
    assert status == 2
    assert "train_amp.py, train_ddp_amp.py: both sides edit the same lines" in errors
    assert "inputs.clone()" in (clone / "train_ddp.py").read_text()
    conflict = amp.read_text()
    assert conflict.count("<<<<<<<") == 1
    assert run(clone, "--update")[:2] == (2, "")  # nothing is settled, and so nothing changes
    assert amp.read_text() == conflict

    for path, text in before.items():
        path.write_text(text)
    assert run(clone, "--update")[0] == 0
    commit(clone)
    replace(baseline, "set_epoch(epoch)", "set_epoch(epoch + 1)")
    assert run(clone, "--update")[0] == 0
    commit(clone)
    for path, text in before.items():
        assert path.read_text() == text.replace("set_epoch(epoch)", "set_epoch(epoch + 1)")
    replace(baseline, "outputs = model(inputs.clone())", "outputs = model(inputs.detach())")
    assert run(clone, "--update")[0] == 2
    assert "inputs.detach()" in amp.read_text()


def test_a_script_with_conflict_markers_is_merged_into_nothing(clone: Path) -> None:
    before = {path: path.read_text() for path in clone.glob("train_*.py")}
    text = (clone / BASELINE).read_text()
    line = text[: text.index("            outputs = model(inputs)\n")].count("\n") + 1
    old = "            outputs = model(inputs)\n"
    marked = text.replace(old, f"<<<<<<< HEAD\n{old}=======\n{old}>>>>>>> mine\n")
    (clone / "mine.py").write_text(marked)
    _, _, errors = run(clone, "ddp", "--onto", "mine.py", "-o", "new.py")
    assert f"mine.py:{line}: both sides edit the same lines" in errors
    (clone / BASELINE).write_text(marked)
    for arguments in (["--update"], ["ddp", "-o", "new.py"]):
        status, printed, errors = run(clone, *arguments)
        assert (status, printed) == (2, "")
        assert f"train.py:{line}: both sides edit the same lines" in errors
    assert {path: path.read_text() for path in clone.glob("train_*.py")} == before
    assert not (clone / "new.py").exists()


def test_without_git_or_a_commit_that_fits_nothing_is_merged(clone: Path) -> None:
    for edit in HALVES:
        replace(clone / BASELINE, *edit[0])
        status, _, errors = run(clone, "--update")
    assert status == 2  # the first update was not committed
    assert "commit both after each --update" in errors
    shutil.rmtree(clone / ".git")
    status, printed, errors = run(clone, "ddp")
    assert (status, printed) == (2, "")
    assert "not a git repository" in errors


def test_scripts_that_do_not_fit_their_techniques_are_named(clone: Path) -> None:
    replace(clone / "train_amp.py", "scaler.update()", "scaler.update(None)")  # in marked lines
    status, printed, _ = run(clone, "--update")
    assert status == 0
    assert "python -m tools.compose ddp amp -o train_ddp_amp.py --force" in printed
    replace(clone / "train_ema.py", "scheduler.step()", "scheduler.step(None)")
    for arguments in (["ema", "ddp"], ["--update"]):
        status, _, errors = run(clone, *arguments)
        assert status == 2
        assert "train_ema.py has an unmarked difference" in errors
        assert "+ scheduler.step(None)" in errors


def test_techniques_of_a_users_own_merge_into_a_sound_script(clone: Path) -> None:
    """Imports come where others have theirs, lines that two techniques share come once, also where
    one of them has more at the place, and the user's docstring stays as it is."""
    sam, ahead, mine = clone / "train_sam.py", clone / "train_ahead.py", clone / "mine.py"
    _, body = split((clone / BASELINE).read_text())
    mine.write_text(f'# mine\nr"""Of \\x.\n\nStart with `python mine.py`.\n"""\n{body}')
    sam.write_text(f'"""Steps to flat minima.\n\nCombines with every technique.\n"""\n{body}')
    before = "from tasks import build_task\n"
    replace(sam, before, f"\n# new #: flat minima\nfrom runtime.run import Sam\n{before}")
    shutil.copy(clone / "train_amp.py", ahead)
    shared = "\n# new #: the configured dtype\n"
    replace(ahead, shared, f"\n# new #: of mine\nfrom math import sqrt\n{shared}")
    commit(clone)
    for onto in ([], ["--onto", "mine.py"]):
        run(clone, "ddp", "amp", "sam", *onto, "-o", "new.py", "--force")
        text = (clone / "new.py").read_text()
        head, _ = split(mine.read_text())
        assert text.startswith(head if onto else '"""Automatic')
        assert text.count("from runtime.run import Sam\n") == 1
        compile(text, "new.py", "exec")
    assert split(run(clone, "amp", "ahead")[1])[1] == split(ahead.read_text())[1]


def test_the_command_line_lists_techniques_and_overwrites_only_by_force(clone: Path) -> None:
    """A file is a technique; a script of a user's own is none."""
    shutil.copy(clone / "train_amp.py", clone / "train_mine.py")
    replace(clone / "train_mine.py", "every technique.", "every technique but `dp`.")
    (clone / "train_half.py").write_text("def main(\n")
    _, listing, _ = run(clone)
    assert [line.split()[0] for line in listing.splitlines()] == sorted([*TECHNIQUES, "mine"])
    assert "mine does not combine with dp" in run(clone, "mine", "dp")[2]
    output = clone / "my_train.py"
    output.write_text("precious")
    status, _, errors = run(clone, "ddp", "amp", "-o", "my_train.py")
    assert status == 2
    assert "--force" in errors
    assert output.read_text() == "precious"
    status, difference, _ = run(clone, "ddp", "ema", "-o", "my_train.py", "--force", "--diff")
    assert status == 0
    assert "`torchrun --standalone --nproc_per_node=2 my_train.py`" in output.read_text()
    assert "+    model = torch.nn.parallel.DistributedDataParallel(" in difference
    assert "-    device = setup(cfg)" in difference
    assert without_reader("-m", "tools.compose", "ddp") == (-signal.SIGPIPE, b"")
