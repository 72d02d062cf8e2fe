"""The entry points differ in marked places only; all sets of techniques merge, train, resume."""

import itertools
import linecache
import re
import shutil
import signal
import subprocess
import sys
import traceback
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from conf.errors import UserError
from tests.helpers import (
    REPOSITORY,
    SCRIPTS,
    checkpoint_of,
    commit,
    folder_with,
    has_ranks,
    published,
    replace,
    run_all,
    summary_of,
    without_reader,
)
from tools import compose as composer
from tools.compose import compose, find_techniques, split, unmarked_lines


def allowed_sets() -> list[tuple[str, ...]]:
    """Return all sets of techniques that combine, each in alphabetical order."""
    excluded = find_techniques()
    counts = range(1, len(excluded) + 1)
    sets = itertools.chain(*(itertools.combinations(excluded, count) for count in counts))
    return [names for names in sets if not any(excluded[name] & {*names} for name in names)]


TECHNIQUES = [Path(name).stem.removeprefix("train_") for name in SCRIPTS if name.count("_") == 1]
SETS = allowed_sets()
TINY = ["model.kwargs.width=4", "data.crop=8", "optimizer.warmup_epochs=0", "epochs=1"]
TINY += ["log.images=0", "loader.num_workers=0"]
LARGEST = [names for names in SETS if not any(set(names) < set(others) for others in SETS)]
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the workshop takes long


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_names_its_command(script: str) -> None:
    text = (REPOSITORY / script).read_text()
    assert len(text.splitlines()) <= 145
    assert re.search(rf"[ `]{script}[ `]", split(text)[0])


class HostReads(TorchFunctionMode):
    """Ends a script whose step reads a tensor, for which the host would wait on a GPU.

    Allowed: reads of what always lies on the host (the ranks' flags), log points, and saves.
    """

    FUNCTIONS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    ALLOWED: tuple[tuple[str, str], ...] = (
        ("process_group.py", "pending_flags"),
        *(("metric_logger.py", "log_point"), ("finite.py", "log_point")),
        ("finite.py", "check"),  # of what is about to be saved
    )

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def __torch_function__(self, function, types, arguments=(), options=None):
        if getattr(function, "__name__", "") in self.FUNCTIONS:
            frames = {(Path(f.filename).name, f.name): f for f in traceback.extract_stack()}
            main = frames.get((self.script, "main"))
            line = linecache.getline(main.filename, main.lineno or 0) if main else ""
            is_step = line.startswith(" " * 12)
            is_allowed = set(self.ALLOWED) & frames.keys()
            assert not is_step or is_allowed, f"{function} in {line}"
        return function(*arguments, **(options or {}))


def test_a_read_in_a_step_is_found() -> None:
    def main() -> None:
        for _ in range(2):
            torch.ones(()).item()

    with pytest.raises(AssertionError, match="item"), HostReads(Path(__file__).name):
        main()


# What all sets go through, first in one process, then with two ranks; processes import only once.

STEP_BY_STEP = sorted(SETS, key=lambda names: (has_ranks("_".join(names)), "fsdp" in names))
"""All sets, each resumed from a checkpoint of the one before; the first from train.py's."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder like the repository with the scripts of all sets, and a run of two steps of each."""
    folder = folder_with(tmp_path_factory.mktemp("workshop"), "train.py")
    before = folder / "runs" / "baseline"
    alone = [["train.py", *TINY, "max_steps=2", f"output_dir={before}"]]
    in_ranks: list[list[str]] = []
    for number, names in enumerate(STEP_BY_STEP, start=2):
        name = "_".join(names)
        (folder / f"train_{name}.py").write_text(compose(list(names)))
        output = folder / "runs" / name
        run = [f"train_{name}.py", *TINY, f"max_steps={2 * number}", f"output_dir={output}"]
        run += ["accumulate_steps=2"] if "accumulate" in names else []
        (in_ranks if has_ranks(name) else alone).append([*run, f"resume={before}"])
        before = output
    run_all(alone, folder, 1, folder, HostReads)
    run_all(in_ranks, folder, 2, folder, HostReads)
    published(before)  # makes a whole file, for the baseline
    last = ["train.py", *TINY, f"max_steps={2 * len(SETS) + 4}", f"resume={before}"]
    run_all([[*last, f"output_dir={folder / 'runs' / 'last'}"]], folder, 1, folder)
    return folder


def run_ruff(folder: Path, *arguments: str) -> None:
    """It finds nothing."""
    command = [sys.executable, "-m", "ruff", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_ruff_finds_nothing_in_any_set(workshop: Path) -> None:
    options = [f"--config={REPOSITORY}/pyproject.toml", *map(str, workshop.glob("train*.py"))]
    run_ruff(workshop, "check", "--ignore=I001", *options)  # imports are in the techniques' order
    run_ruff(workshop, "format", "--check", *options)


@pytest.mark.parametrize("names", SETS, ids="_".join)
def test_a_set_merges_trains_and_resumes_from_another_one(
    names: tuple[str, ...], workshop: Path
) -> None:
    name = "_".join(names)
    script = workshop / f"train_{name}.py"
    text = script.read_text()
    baseline = split((workshop / "train.py").read_text())[1]
    assert unmarked_lines(baseline, split(text)[1]) == []
    for technique in names:
        part = (REPOSITORY / f"train_{technique}.py").read_text()
        marked = [line for line in part.splitlines() if line.strip().startswith(composer.MARKER)]
        assert set(marked) <= set(text.splitlines())
    run, number = workshop / "runs" / name, STEP_BY_STEP.index(names)
    summary, log = summary_of(run), (run / "train.log").read_text()
    assert (summary["steps"], summary["script"]) == (2 * number + 4, script.name)
    assert summary["world_size"] == 1 + has_ranks(name)
    parts, resumed = checkpoint_of(run), STEP_BY_STEP[number - 1] if number else ()
    assert ("ema" in names) == ("ema" in parts)
    assert ("amp" in names) == ("scaler" in parts)
    assert f"step {2 * number + 2}" in next(x for x in log.splitlines() if "resumed from" in x)
    is_fresh = "ema" in names and "ema" not in resumed
    assert ("the ema starts fresh" in log) == is_fresh
    assert not is_fresh or parts["ema"]["n_averaged"] == 2  # the first one is of its first step
    assert parts["model"].keys() == checkpoint_of(workshop / "runs" / "baseline")["model"].keys()


def test_the_baseline_resumes_from_a_set(workshop: Path) -> None:
    summary = summary_of(workshop / "runs" / "last")
    assert (summary["script"], summary["steps"]) == ("train.py", 2 * len(SETS) + 4)


def test_a_users_edit_of_the_baseline_is_carried_into_the_largest_sets(tmp_path) -> None:
    mine = tmp_path / "my_train.py"
    for names, edits in product(LARGEST, (*HALVES, EDITS)):
        shutil.copy(REPOSITORY / "train.py", mine)
        for old, new in edits:
            replace(mine, old, new)
        text = compose(list(names), onto=mine, output="my_other.py")
        assert all(text.count(new) == 1 for _, new in edits)
        # What the techniques changed in the baseline is what they change here, and nothing else.
        assert unmarked_lines(split(mine.read_text())[1], split(text)[1]) == []
    assert "my_other.py`" in split(text)[0]


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository with copies of the scripts, and one of a user's own."""
    folder_with(tmp_path, "train.py")
    for path in REPOSITORY.glob("train_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "train_my_own.py").write_text("print('mine')\n")
    commit(tmp_path)
    return tmp_path


def test_a_file_is_a_technique_and_a_script_of_a_users_own_is_none(clone: Path) -> None:
    for name in ("train_mine.py", "train_my_own.py"):
        shutil.copy(clone / "train_amp.py", clone / name)
    replace(clone / "train_mine.py", "every technique.", "every technique but `dp`.")
    (clone / "train_half_written.py").write_text("def main(\n")
    found = find_techniques(clone)
    assert set(found) == {*TECHNIQUES, "mine"}
    assert (found["dp"], found["amp"]) == ({"ddp", "fsdp", "mine"}, set())
    (clone / "train_half.py").write_bytes(b"\xe9")
    with pytest.raises(UserError, match=r"train_half\.py: .*; correct it"):
        find_techniques(clone)


def run_compose(*arguments: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Run tools.compose as a user does."""
    command = [sys.executable, "-m", "tools.compose", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def update(clone: Path) -> tuple[int, str, str]:
    done = run_compose("--update", folder=clone)
    return done.returncode, done.stdout, done.stderr


def test_edits_of_the_baseline_are_brought_to_all_scripts_however_often(clone: Path) -> None:
    """One before it is committed, and one after that; a merge does not wait for either."""
    for edits, is_committed in zip(HALVES, (False, True), strict=True):
        for old, new in edits:
            replace(clone / "train.py", old, new)
        if is_committed:
            commit(clone)
        merged = run_compose("ddp", "amp", folder=clone).stdout
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
    assert update(clone) == (0, "", "")


def test_an_edit_of_the_only_techniques_own_lines_is_a_conflict_and_never_lost(clone: Path) -> None:
    for path in clone.glob("train_*.py"):
        if path.name != "train_amp.py":
            path.unlink()
    commit(clone)
    replace(clone / "train.py", "outputs = model(inputs)", "outputs = model(inputs.clone())")
    for _ in range(2):
        assert update(clone)[0] == 2
        assert "inputs.clone()" in (clone / "train_amp.py").read_text()
        shutil.copy(REPOSITORY / "train_amp.py", clone)
        commit(clone)


def test_without_git_or_a_commit_that_fits_nothing_is_merged(clone: Path) -> None:
    for edit in HALVES:
        replace(clone / "train.py", *edit[0])
        status, _, errors = update(clone)
    assert status == 2  # the first update was not committed
    assert "commit both after each --update" in errors
    shutil.rmtree(clone / ".git")
    done = run_compose("ddp", folder=clone)
    assert (done.returncode, done.stdout) == (2, "")
    assert "commit train.py and the scripts" in done.stderr


def test_a_reader_that_ends_early_is_no_error() -> None:
    assert without_reader("-m", "tools.compose", "ddp") == (-signal.SIGPIPE, b"")


def test_edits_of_the_same_lines_are_shown_with_both_sides(clone: Path) -> None:
    shutil.copy(clone / "train.py", clone / "my_train.py")
    replace(clone / "my_train.py", "outputs = model(inputs)", "outputs = model(inputs.clone())")
    result = run_compose("ddp", "amp", "--onto", "my_train.py", "-o", "new.py", folder=clone)
    assert result.returncode == 2
    for shown in ("new.py", "my_train.py", "train_amp.py", "inputs.clone()", "torch.autocast"):
        assert shown in result.stderr
    assert (clone / "new.py").read_text().count("<<<<<<<") == 1


def test_a_conflict_that_is_settled_comes_back_only_when_its_lines_change_again(
    clone: Path,
) -> None:
    baseline, names = clone / "train.py", ("train_amp.py", "train_ddp_amp.py")
    before = {name: (clone / name).read_text() for name in names}
    replace(baseline, "outputs = model(inputs)", "outputs = model(inputs.clone())")
    status, _, errors = update(clone)
    assert status == 2
    assert "train_amp.py, train_ddp_amp.py: both sides edit the same lines" in errors
    assert "inputs.clone()" in (clone / "train_ddp.py").read_text()
    conflict = (clone / "train_amp.py").read_text()
    assert update(clone)[:2] == (2, "")  # nothing is settled, and so nothing changes
    assert (clone / "train_amp.py").read_text() == conflict

    for name, text in before.items():
        (clone / name).write_text(text)
    assert update(clone)[0] == 0
    commit(clone)
    replace(baseline, "set_epoch(epoch)", "set_epoch(epoch + 1)")
    assert update(clone)[0] == 0
    commit(clone)
    for name in names:
        text = (clone / name).read_text()
        assert text.count("                outputs = model(inputs)\n") == 1
        assert "set_epoch(epoch + 1)" in text
    replace(baseline, "outputs = model(inputs.clone())", "outputs = model(inputs.detach())")
    assert update(clone)[0] == 2
    assert "inputs.detach()" in (clone / "train_amp.py").read_text()


def test_scripts_that_do_not_fit_their_techniques_are_named(clone: Path) -> None:
    replace(clone / "train_amp.py", "scaler.update()", "scaler.update(None)")  # in marked lines
    status, printed, _ = update(clone)
    assert status == 0
    assert "python -m tools.compose ddp amp -o train_ddp_amp.py --force" in printed
    (clone / "train_amp.py").unlink()
    status, _, errors = update(clone)
    assert status == 2
    assert "unknown technique amp" in errors

    replace(clone / "train_ema.py", "scheduler.step()", "scheduler.step(None)")
    for arguments in (["ema", "ddp"], ["--update"]):
        done = run_compose(*arguments, folder=clone)
        assert done.returncode == 2
        assert "train_ema.py has an unmarked difference" in done.stderr
        assert "+ scheduler.step(None)" in done.stderr


def test_a_technique_of_a_users_own_merges_into_a_sound_script(clone: Path) -> None:
    """Its imports come where others have theirs; the user's docstring stays as it is."""
    sam, mine = clone / "train_sam.py", clone / "mine.py"
    _, body = split((clone / "train.py").read_text())
    mine.write_text(f'# mine\nr"""Of \\x.\n\nStart with `python mine.py`.\n"""\n{body}')
    sam.write_text(f'"""Steps to flat minima.\n\nCombines with every technique.\n"""\n{body}')
    before = "from tasks import build_task\n"
    replace(sam, before, f"\n# new #: flat minima\nfrom runtime.run import Sam\n{before}")
    commit(clone)
    for onto in ([], ["--onto", "mine.py"]):
        done = run_compose("ddp", "amp", "sam", *onto, "-o", "new.py", folder=clone)
        assert done.returncode == 0, done.stderr
        text = (clone / "new.py").read_text()
        assert text.count("Start with ") == 1
        assert "Start with `torchrun --standalone --nproc_per_node=2 new.py`" in text
        assert text.startswith('# mine\nr"""Of \\x.\n' if onto else '"""Automatic')
        rules = "--select=F811,F821"
        run_ruff(clone, "check", "--isolated", "--line-length=100", rules, "new.py")
        (clone / "new.py").unlink()


def test_lines_that_two_techniques_share_are_merged_once(clone: Path) -> None:
    """Also where one of them has more lines at the place."""
    mine, shared = clone / "train_ahead.py", "\n# new #: the configured dtype\n"
    shutil.copy(clone / "train_amp.py", mine)
    replace(mine, shared, f"\n# new #: of mine\nfrom math import sqrt\n{shared}")
    commit(clone)
    merged = compose(["amp", "ahead"], folder=clone)
    assert split(merged)[1] == split(mine.read_text())[1]


def test_command_line_lists_writes_shows_and_overwrites_only_by_force(tmp_path) -> None:
    listing = run_compose().stdout
    assert [line.split()[0] for line in listing.splitlines()] == TECHNIQUES
    output = tmp_path / "my_train.py"
    assert run_compose("ddp", "amp", "-o", str(output)).returncode == 0
    assert "`torchrun --standalone --nproc_per_node=2 my_train.py`" in output.read_text()
    output.write_text("precious")
    again = run_compose("ddp", "amp", "-o", str(output))
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert output.read_text() == "precious"
    assert run_compose("ddp", "-o", str(output), "--force", "--diff").returncode == 0
    assert "DistributedDataParallel" in output.read_text()
    # Their order changes only the docstring.
    texts = [compose(names) for names in (["ema", "ddp", "amp"], ["amp", "ema", "ddp"])]
    assert split(texts[0])[1] == split(texts[1])[1]
    difference = run_compose("ddp", "ema", "--diff").stdout
    assert "+    model = nn.parallel.DistributedDataParallel(" in difference
    assert "-    device = setup(cfg)" in difference
