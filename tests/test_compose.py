"""Techniques merge into a user's own script, and edits of the baseline reach all scripts."""

import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, SCRIPTS, commit, folder_with, replace
from tests.processes import without_reader
from tests.test_side_by_side import LARGEST
from tools.compose import BASELINE, compose, find_techniques, split, unmarked_lines

pytestmark = pytest.mark.slow

TECHNIQUES = [Path(name).stem.removeprefix("train_") for name in SCRIPTS if name.count("_") == 1]
EDITS = [  # a user's, in train.py
    ("import hydra\n", "import hydra\nimport numpy as np\n"),
    ("inputs and targets\n", "inputs and targets\n            inputs = inputs.clone()\n"),
    ("targets)\n", "targets)\n\n            loss = loss + 0 * loss\n"),
    ("run.resume()\n", "run.resume()\n    print('goes on')\n"),
    ("callbacks\n", "callbacks\n    print('logs to', run.run_dir)\n"),
    ("task.num_outputs)\n", "task.num_outputs)\n    model = nn.Sequential(model, nn.Identity())\n"),
    ("loss, grad_norm)\n", "loss, grad_norm)\n            print('loss', float(loss))\n"),
    ("totals, shown)\n", "totals, shown)\n        print('validated', epoch)\n"),
    ("    )\n    run.resume()\n", "    )\n    print('on', device)\n    run.resume()\n"),
    ("loss = task.loss(", "loss = 2 * task.loss("),
    ("# forward\n", "# forward\n            targets = targets.clone()\n"),
]
HALVES = EDITS[::2], EDITS[1::2]  # without neighbours


def test_a_users_edit_of_the_baseline_is_carried_into_the_largest_sets(tmp_path) -> None:
    mine = tmp_path / "my_train.py"
    for names, edits in product(LARGEST, (*HALVES, EDITS)):
        shutil.copy(REPOSITORY / BASELINE, mine)
        for old, new in edits:
            replace(mine, old, new)
        text = compose(list(names), onto=mine)
        assert all(text.count(new) == 1 for _, new in edits)
        # What the techniques changed in the baseline is what they change here, and nothing else.
        assert unmarked_lines(split(mine.read_text())[1], split(text)[1]) == []


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository with copies of the scripts, and one of a user's own."""
    folder_with(tmp_path, BASELINE)
    for path in REPOSITORY.glob("train_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "train_my_own.py").write_text("print('mine')\n")
    commit(tmp_path)
    return tmp_path


def run_compose(*arguments: str, folder: Path = REPOSITORY) -> tuple[int, str, str]:
    """Exit code, prints and errors of tools.compose, as a user runs it."""
    command = [sys.executable, "-m", "tools.compose", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def update(clone: Path) -> tuple[int, str, str]:
    return run_compose("--update", folder=clone)


def test_a_file_is_a_technique_and_a_script_of_a_users_own_is_none(clone: Path) -> None:
    shutil.copy(clone / "train_amp.py", clone / "train_mine.py")
    replace(clone / "train_mine.py", "every technique.", "every technique but `dp`.")
    (clone / "train_half_written.py").write_text("def main(\n")
    found = find_techniques(clone)
    assert set(found) == {*TECHNIQUES, "mine"}
    assert (found["mine"], found["amp"]) == ({"dp"}, set())


def test_edits_of_the_baseline_are_brought_to_all_scripts_however_often(clone: Path) -> None:
    """One before it is committed, and one after that; a merge does not wait for either."""
    for edits, is_committed in zip(HALVES, (False, True), strict=True):
        for old, new in edits:
            replace(clone / BASELINE, old, new)
        if is_committed:
            commit(clone)
        _, merged, _ = run_compose("ddp", "amp", folder=clone)
        assert all(merged.count(new) == 1 for _, new in edits)
        status, printed, errors = update(clone)
        assert status == 0, errors
        for name in (*TECHNIQUES, "ddp_amp"):
            text = (clone / f"train_{name}.py").read_text()
            assert all(text.count(new) == 1 for _, new in edits)
            assert f"train_{name}.py follows train.py" in printed
        assert update(clone) == (0, "", "")
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
    status, _, errors = update(clone)
    assert status == 2
    assert "train_amp.py, train_ddp_amp.py: both sides edit the same lines" in errors
    assert "inputs.clone()" in (clone / "train_ddp.py").read_text()
    conflict = amp.read_text()
    assert conflict.count("<<<<<<<") == 1
    assert update(clone)[:2] == (2, "")  # nothing is settled, and so nothing changes
    assert amp.read_text() == conflict

    for path, text in before.items():
        path.write_text(text)
    assert update(clone)[0] == 0
    commit(clone)
    replace(baseline, "set_epoch(epoch)", "set_epoch(epoch + 1)")
    assert update(clone)[0] == 0
    commit(clone)
    for path, text in before.items():
        assert path.read_text() == text.replace("set_epoch(epoch)", "set_epoch(epoch + 1)")
    replace(baseline, "outputs = model(inputs.clone())", "outputs = model(inputs.detach())")
    assert update(clone)[0] == 2
    assert "inputs.detach()" in amp.read_text()


def test_without_git_or_a_commit_that_fits_nothing_is_merged(clone: Path) -> None:
    for edit in HALVES:
        replace(clone / BASELINE, *edit[0])
        status, _, errors = update(clone)
    assert status == 2  # the first update was not committed
    assert "commit both after each --update" in errors
    shutil.rmtree(clone / ".git")
    status, printed, errors = run_compose("ddp", folder=clone)
    assert (status, printed) == (2, "")
    assert "commit train.py and the scripts" in errors


def test_scripts_that_do_not_fit_their_techniques_are_named(clone: Path) -> None:
    replace(clone / "train_amp.py", "scaler.update()", "scaler.update(None)")  # in marked lines
    status, printed, _ = update(clone)
    assert status == 0
    assert "python -m tools.compose ddp amp -o train_ddp_amp.py --force" in printed
    replace(clone / "train_ema.py", "scheduler.step()", "scheduler.step(None)")
    for arguments in (["ema", "ddp"], ["--update"]):
        status, _, errors = run_compose(*arguments, folder=clone)
        assert status == 2
        assert "train_ema.py has an unmarked difference" in errors
        assert "+ scheduler.step(None)" in errors


def test_a_technique_of_a_users_own_merges_into_a_sound_script(clone: Path) -> None:
    """Its imports come where others have theirs; the user's docstring stays as it is."""
    sam, mine = clone / "train_sam.py", clone / "mine.py"
    _, body = split((clone / BASELINE).read_text())
    mine.write_text(f'# mine\nr"""Of \\x.\n\nStart with `python mine.py`.\n"""\n{body}')
    sam.write_text(f'"""Steps to flat minima.\n\nCombines with every technique.\n"""\n{body}')
    before = "from tasks import build_task\n"
    replace(sam, before, f"\n# new #: flat minima\nfrom runtime.run import Sam\n{before}")
    commit(clone)
    for onto in ([], ["--onto", "mine.py"]):
        run_compose("ddp", "amp", "sam", *onto, "-o", "new.py", "--force", folder=clone)
        text = (clone / "new.py").read_text()
        head, _ = split(mine.read_text())
        assert text.startswith(head if onto else '"""Automatic')
        assert text.count("from runtime.run import Sam\n") == 1
        compile(text, "new.py", "exec")


def test_lines_that_two_techniques_share_are_merged_once(clone: Path) -> None:
    """Also where one of them has more lines at the place."""
    mine, shared = clone / "train_ahead.py", "\n# new #: the configured dtype\n"
    shutil.copy(clone / "train_amp.py", mine)
    replace(mine, shared, f"\n# new #: of mine\nfrom math import sqrt\n{shared}")
    commit(clone)
    merged = compose(["amp", "ahead"], folder=clone)
    assert split(merged)[1] == split(mine.read_text())[1]


def test_command_line_lists_writes_shows_and_overwrites_only_by_force(tmp_path) -> None:
    _, listing, _ = run_compose()
    assert [line.split()[0] for line in listing.splitlines()] == TECHNIQUES
    output = tmp_path / "my_train.py"
    output.write_text("precious")
    status, _, errors = run_compose("ddp", "amp", "-o", str(output))
    assert status == 2
    assert "--force" in errors
    assert output.read_text() == "precious"
    status, difference, _ = run_compose("ddp", "ema", "-o", str(output), "--force", "--diff")
    assert status == 0
    assert "`torchrun --standalone --nproc_per_node=2 my_train.py`" in output.read_text()
    assert "+    model = nn.parallel.DistributedDataParallel(" in difference
    assert "-    device = setup(cfg)" in difference
    assert without_reader("-m", "tools.compose", "ddp") == (-signal.SIGPIPE, b"")
