"""The entry points differ in marked places only, and all sets of techniques merge, train and resume."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import compose as composer
from compose import MergeError, allowed_sets, compose, find_techniques, unmarked_differences
from tests.helpers import (
    ENVIRONMENT,
    FORKSERVER,
    PACKAGES,
    REPOSITORY,
    SCRIPTS,
    checkpoint_of,
    free_port,
    start,
    summary_of,
    train,
)

TECHNIQUES = [Path(name).stem.removeprefix("train_") for name in SCRIPTS if name.count("_") == 1]
SETS = allowed_sets()
TINY = ["model.kwargs.width=8", "data.crop=8", "optimizer.warmup_epochs=0", "epochs=1"]
EDITS = {  # of a user's, in train.py
    "an extra loss term": (
        "            loss = task.loss(outputs, targets)\n",
        "            loss = loss + 0.001 * outputs.square().mean()\n",
    ),
    "a model of their own": (
        "    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)\n",
        "    model = nn.Sequential(model, nn.Identity())\n",
    ),
    "a log line": (
        "        run.epoch(task, totals, shown)\n",
        "        print('validated', epoch)\n",
    ),
}


def is_distributed(names: tuple[str, ...]) -> bool:
    return bool({"ddp", "fsdp"} & set(names))


def edited(text: str) -> str:
    for line, added in EDITS.values():
        assert line in text
        text = text.replace(line, line + added)
    return text


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_difference_from_the_baseline_is_marked(script: str) -> None:
    baseline, text = ((REPOSITORY / name).read_text() for name in ("train.py", script))
    assert unmarked_differences(baseline, text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scheduler.step()", "scheduler.step(None)"),
        ("        model.train()\n", ""),
        ("            loss.backward()\n", "            loss.backward()\n            print(loss)\n"),
    ],
)
def test_an_unmarked_edit_is_found(old: str, new: str) -> None:
    baseline = (REPOSITORY / "train.py").read_text()
    assert old in baseline
    assert len(unmarked_differences(baseline, baseline.replace(old, new))) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_entry_points_stay_short_and_name_their_command(script: str) -> None:
    text = (REPOSITORY / script).read_text()
    assert len(text.splitlines()) <= 145
    assert re.search(rf"[ `]{script}[ `]", composer.split_docstring(text)[0])


def test_techniques_are_found_by_their_files() -> None:
    found = find_techniques()
    assert list(found) == TECHNIQUES
    assert found["ddp"] == {"dp", "fsdp"}
    assert found["amp"] == set()


def test_a_file_more_is_a_technique_and_a_script_of_a_users_own_is_none(tmp_path) -> None:
    for path in REPOSITORY.glob("train*.py"):
        shutil.copy(path, tmp_path)
    amp = (tmp_path / "train_amp.py").read_text()
    (tmp_path / "train_mine.py").write_text(
        amp.replace("every technique.", "every technique but `dp`.")
    )
    (tmp_path / "train_my_own.py").write_text(amp)
    (tmp_path / "train_copy.py").write_text((tmp_path / "train.py").read_text())
    assert set(find_techniques(tmp_path)) == {*TECHNIQUES, "mine"}
    assert find_techniques(tmp_path)["dp"] == {"ddp", "fsdp", "mine"}
    (tmp_path / "train_half_written.py").write_text("def main(\n")
    assert "mine" in find_techniques(tmp_path)
    (tmp_path / "train_half.py").write_text("def main(\n")
    with pytest.raises(MergeError, match=r"train_half\.py, line 1: .* never closed; correct it"):
        find_techniques(tmp_path)


def test_composites_in_the_repository_are_the_merge_of_their_parts() -> None:
    assert (REPOSITORY / "train_ddp_amp.py").read_text() == compose(["ddp", "amp"])


# What all sets are put through, a whole group in one process (or two ranks) that imports only once.


def run_scripts(folder: Path, runs: list[list[str]], env: dict[str, str]) -> None:
    """Run scripts with their arguments one after the other; what fails leaves its traceback in a file."""
    os.environ.update(env)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    prints = os.open(folder / f"prints-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    from hydra.core.global_hydra import GlobalHydra

    for number, arguments in enumerate(runs):
        if "MASTER_PORT" in env:
            os.environ["MASTER_PORT"] = str(int(env["MASTER_PORT"]) + number)
        sys.argv = arguments
        try:
            runpy.run_path(str(folder / arguments[0]), run_name="__main__")
        except BaseException:
            Path(folder, f"{arguments[0]}.failed").write_text(traceback.format_exc())
        finally:
            GlobalHydra.instance().clear()
            if "RANK" in env:
                from runtime.distributed import leave_process_group

                leave_process_group()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder like the repository with the scripts of all sets, their runs and a resume of each."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in PACKAGES:
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copy(REPOSITORY / "train.py", folder)
    alone: list[list[str]] = []
    spread: list[list[str]] = []
    resumed: list[list[str]] = []
    for names in SETS:
        name = "_".join(names)
        (folder / f"train_{name}.py").write_text(compose(list(names)))
        output = folder / "runs" / name
        run = [f"train_{name}.py", *TINY, "max_steps=2", f"output_dir={output}"]
        run += ["accumulate_steps=2"] if "accumulate" in names else []
        (spread if is_distributed(names) else alone).append(run)
        resumed.append(
            ["train.py", *TINY, "max_steps=3", f"output_dir={output}-resumed", f"resume={output}"]
        )
    # Each run has a port of its own, so that nothing of the one before can be met.
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    groups: list[list[tuple[list[list[str]], dict[str, str]]]] = [
        [(alone, {})],
        [(spread, {**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)],
        [(resumed, {})],
    ]
    for group in groups:
        processes = [
            FORKSERVER.Process(target=run_scripts, args=(folder, runs, ENVIRONMENT | env))
            for runs, env in group
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(280)
            process.kill()
    return folder


@pytest.fixture(scope="module")
def complaints(workshop: Path) -> str:
    """What the type checker and the formatter say of the scripts of all sets."""
    # With the cache of `make lint`: torch takes most of the time.
    settings = f"--config-file={REPOSITORY}/pyproject.toml", f"--cache-dir={REPOSITORY}/.mypy_cache"
    said = ""
    for command in (["mypy", *settings], ["ruff", "format", "--check", "--line-length=100"]):
        scripts = [f"train_{'_'.join(names)}.py" for names in SETS]
        done = subprocess.run(
            [sys.executable, "-m", *command, *scripts], cwd=workshop, capture_output=True, text=True
        )
        assert done.stdout, done.stderr
        said += done.stdout
    return said


@pytest.mark.timeout(900)  # the first one makes the workshop
@pytest.mark.parametrize("names", SETS, ids="_".join)
def test_a_set_merges_trains_and_resumes_in_the_baseline(
    names: tuple[str, ...], workshop: Path, complaints: str
) -> None:
    name = "_".join(names)
    script = workshop / f"train_{name}.py"
    text = script.read_text()
    assert "<<<<" not in text
    assert unmarked_differences((workshop / "train.py").read_text(), text) == []
    for technique in names:
        part = (REPOSITORY / f"train_{technique}.py").read_text()
        marked = [line for line in part.splitlines() if line.strip().startswith(composer.MARKER)]
        assert marked
        assert set(marked) <= set(text.splitlines())
    assert script.name not in complaints
    failure = workshop / f"{script.name}.failed"
    assert not failure.exists(), failure.read_text()
    summary = summary_of(workshop / "runs" / name)
    assert (summary["steps"], summary["script"]) == (2, script.name)
    assert summary["world_size"] == (2 if is_distributed(names) else 1)
    parts = checkpoint_of(workshop / "runs" / name)
    assert ("ema" in names) == ("ema" in parts)
    assert ("amp" in names) == ("scaler" in parts)
    resumed = summary_of(workshop / "runs" / f"{name}-resumed")
    assert (resumed["steps"], resumed["script"]) == (3, "train.py")


@pytest.mark.parametrize("names", SETS, ids="_".join)
def test_a_users_edit_of_the_baseline_is_carried_into_every_set(
    names: tuple[str, ...], tmp_path
) -> None:
    mine = tmp_path / "my_train.py"
    mine.write_text(edited((REPOSITORY / "train.py").read_text()))
    text = compose(list(names), onto=mine, output="my_other.py")
    assert "<<<<" not in text
    compile(text, "merged", "exec")
    lines = [line.strip() for line in text.splitlines()]
    for _, added in EDITS.values():
        assert lines.count(added.strip()) == 1
    # What the techniques changed in the baseline is what they change here, and nothing else.
    assert unmarked_differences(mine.read_text(), text) == []
    assert "my_other.py`" in composer.split_docstring(text)[0]


def test_an_edited_script_of_a_users_own_trains_with_techniques(tmp_path) -> None:
    for name in PACKAGES:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    mine = tmp_path / "my_train.py"
    mine.write_text(edited((REPOSITORY / "train.py").read_text()))
    (tmp_path / "my_amp_ema.py").write_text(compose(["amp", "ema"], mine, "my_amp_ema.py"))
    printed = train("my_amp_ema.py", tmp_path / "run", *TINY, "max_steps=2", folder=tmp_path)
    assert "validated 0" in printed


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path) -> Path:
    """The scripts in a git repository of their own, with a script of a user's beside them."""
    for path in [*REPOSITORY.glob("train*.py"), REPOSITORY / "compose.py"]:
        shutil.copy(path, tmp_path)
    (tmp_path / "train_my_own.py").write_text("print('mine')\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "scripts")
    return tmp_path


@pytest.mark.parametrize("is_committed", [False, True])
def test_an_edit_of_the_baseline_is_brought_to_all_scripts(is_committed: bool, clone: Path) -> None:
    baseline = clone / "train.py"
    baseline.write_text(edited(baseline.read_text()))
    if is_committed:
        git(clone, "commit", "--quiet", "-am", "my loss")
    stale = start("compose.py", "ddp", folder=clone)
    assert stale.returncode == 1
    assert "train_ddp.py is older than train.py; run python compose.py --update" in stale.stderr
    result = start("compose.py", "--update", folder=clone)
    assert result.returncode == 0, result.stderr
    scripts = [f"train_{name}.py" for name in [*TECHNIQUES, "ddp_amp"]]
    for script in scripts:
        text = (clone / script).read_text()
        assert unmarked_differences(baseline.read_text(), text) == []
        assert all(text.count(added) == 1 for _, added in EDITS.values())
        assert f"{script} follows train.py" in result.stdout
    assert (clone / "train_my_own.py").read_text() == "print('mine')\n"
    assert (clone / "train_ddp_amp.py").read_text() == compose(["ddp", "amp"], folder=clone)
    assert start("compose.py", "--update", folder=clone).stdout == ""
    assert start("compose.py", "ddp", "ema", folder=clone).returncode == 0


def test_edits_of_the_same_lines_are_shown_with_both_sides(clone: Path) -> None:
    baseline = clone / "train.py"
    text = baseline.read_text().replace(
        "outputs = model(inputs)", "outputs = model(inputs.clone())"
    )
    mine = clone / "my_train.py"
    mine.write_text(text)
    result = start(
        "compose.py", "ddp", "amp", "--onto", "my_train.py", "-o", "new.py", folder=clone
    )
    assert result.returncode == 1
    for shown in ("new.py", "my_train.py", "train_amp.py", "inputs.clone()", "torch.autocast"):
        assert shown in result.stderr
    written = (clone / "new.py").read_text()
    assert written.count("<<<<<<<") == written.count(">>>>>>>") == 1
    assert "DistributedDataParallel(model" in written
    printed = start("compose.py", "ddp", "amp", "--onto", "my_train.py", folder=clone)
    assert printed.returncode == 1
    assert "inputs.clone()" in printed.stderr
    assert printed.stdout.count("<<<<<<<") == 1

    baseline.write_text(text)
    assert start("compose.py", "amp", folder=clone).returncode == 1  # it would drop the edit
    result = start("compose.py", "--update", folder=clone)
    assert result.returncode == 1
    for script in ("train_amp.py", "train_ddp_amp.py"):
        assert f"{script}: both sides edit the same lines" in result.stderr
        assert "inputs.clone()" in (clone / script).read_text()
    assert "inputs.clone()" in (clone / "train_ddp.py").read_text()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dp", "ddp"], "dp does not combine with ddp"),
        (["ddp", "amp", "fsdp"], "ddp does not combine with fsdp"),
        (["ddp", "ddp"], "names ddp twice"),
        (["tpu"], "unknown technique tpu; use some of accumulate, amp, ddp, dp, ema, fsdp"),
    ],
)
def test_senseless_sets_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(MergeError, match=message):
        compose(names)


def test_the_order_of_the_names_does_not_matter() -> None:
    texts = [compose(names) for names in (["ema", "ddp", "amp"], ["amp", "ema", "ddp"])]
    assert composer.split_docstring(texts[0])[1] == composer.split_docstring(texts[1])[1]


def test_command_line_lists_writes_shows_and_overwrites_only_by_force(tmp_path) -> None:
    listing = start("compose.py").stdout
    assert [line.split()[0] for line in listing.splitlines()] == TECHNIQUES
    output = tmp_path / "my_train.py"
    assert start("compose.py", "ddp", "amp", "-o", str(output)).returncode == 0
    assert "`torchrun --standalone --nproc_per_node=2 my_train.py`" in output.read_text()
    output.write_text("precious")
    again = start("compose.py", "ddp", "amp", "-o", str(output))
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert output.read_text() == "precious"
    assert start("compose.py", "ddp", "-o", str(output), "--force").returncode == 0
    assert "DistributedDataParallel" in output.read_text()
    difference = start("compose.py", "ddp", "ema", "--diff").stdout
    assert (
        "+    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)"
        in difference
    )
    assert "-    device = resolve_device(cfg.device)" in difference


@pytest.mark.parametrize(
    ("technique", "line"),
    [("amp", '    state["scaler"] = scaler\n'), ("ema", '    state["ema"] = ema\n')],
)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_technique_that_forgets_its_state_does_not_resume_exactly(
    technique: str, line: str, forgets: bool, tmp_path
) -> None:
    """float16 overflows in its first steps at such a scale: a fresh scaler skips steps again."""
    for name in PACKAGES:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    script = f"train_{technique}.py"
    text = (REPOSITORY / script).read_text()
    assert line in text
    (tmp_path / script).write_text(text.replace(line, "") if forgets else text)
    options = [*TINY]
    if technique == "amp":
        options += ["amp.dtype=float16", "amp.init_scale=1e6"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(script, whole, *options, "max_steps=8", folder=tmp_path)
    train(script, halves, *options, "max_steps=4", folder=tmp_path)
    train(script, halves, *options, "max_steps=8", "resume=auto", folder=tmp_path)
    first, second = summary_of(whole), summary_of(halves)
    assert (first["val/loss"] != second["val/loss"]) == forgets
