"""The entry points differ in marked places only, and techniques merge without conflict."""

import difflib
import itertools

import pytest

from compose import REFUSED, TECHNIQUES, compose, split_docstring
from tests.helpers import REPOSITORY, SCRIPTS, start, train

MARKER = "# new #: "
ALLOWED = [
    techniques
    for count in range(1, len(TECHNIQUES) + 1)
    for techniques in itertools.permutations(TECHNIQUES, count)
    if not any(refused <= set(techniques) for refused in REFUSED)
]


def unmarked_hunks(baseline: str, script: str) -> list[str]:
    """The differences from the baseline, docstrings aside, that do not start with the marker."""
    old, new = (split_docstring(text)[1].splitlines() for text in (baseline, script))
    hunks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    unmarked = []
    for kind, old_start, old_end, new_start, new_end in hunks:
        if kind == "equal":
            continue
        added = [line.strip() for line in new[new_start:new_end] if line.strip()]
        removed = [line for line in old[old_start:old_end] if line.strip()]
        if (added or removed) and not (added and added[0].startswith(MARKER)):
            unmarked.append("\n".join(removed + added))
    return unmarked


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_difference_from_the_baseline_is_marked(script: str) -> None:
    baseline, text = ((REPOSITORY / name).read_text() for name in ("train.py", script))
    assert unmarked_hunks(baseline, text) == []


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
    assert len(unmarked_hunks(baseline, baseline.replace(old, new))) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_entry_points_stay_short_and_name_their_command(script: str) -> None:
    text = (REPOSITORY / script).read_text()
    assert len(text.splitlines()) <= 145
    assert f" {script}`" in split_docstring(text)[0]


def test_composites_in_the_repository_are_the_merge_of_their_parts() -> None:
    composites = [name for name in SCRIPTS if name.count("_") > 1]
    assert composites == ["train_ddp_amp.py"]
    for name in composites:
        techniques = name.removesuffix(".py").split("_")[1:]
        assert (REPOSITORY / name).read_text() == compose(techniques)


@pytest.mark.parametrize("techniques", ALLOWED, ids="_".join)
def test_allowed_techniques_merge_in_any_order(techniques: tuple[str, ...]) -> None:
    _, script = split_docstring(compose(list(techniques)))
    _, other_order = split_docstring(compose(sorted(techniques)))
    assert script == other_order
    compile(script, "merged", "exec")
    for technique in techniques:
        _, part = split_docstring((REPOSITORY / f"train_{technique}.py").read_text())
        marked = [line for line in part.splitlines() if line.strip().startswith(MARKER)]
        assert marked
        assert set(marked) <= set(script.splitlines())


@pytest.mark.parametrize(
    "techniques",
    sorted({tuple(sorted(names)) for names in ALLOWED if len(names) > 1}),
    ids="_".join,
)
def test_a_merged_script_trains(techniques: tuple[str, ...], tmp_path) -> None:
    for name in ("conf", "loaders", "models", "runtime", "data"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    name = f"train_{'_'.join(techniques)}.py"
    (tmp_path / name).write_text(compose(list(techniques)))
    train(
        name,
        tmp_path / "run",
        "epochs=1",
        "optimizer.warmup_epochs=0",
        "max_steps=2",
        folder=tmp_path,
    )
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


def test_a_conflict_names_the_technique(tmp_path) -> None:
    for name in ("train.py", "train_ddp.py", "train_amp.py"):
        text = (REPOSITORY / name).read_text()
        edited = text.replace("train_loader.set_epoch(epoch)", f"train_loader.set_epoch({name!r})")
        (tmp_path / name).write_text(edited)
    with pytest.raises(ValueError, match="amp with ddp amp: 1 conflicts"):
        compose(["ddp", "amp"], folder=tmp_path)


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        (["dp", "ddp"], "ddp with dp makes no sense: both split the batch"),
        (["ddp", "ddp"], "names a technique twice"),
        (["tpu"], "unknown technique tpu; use some of dp, ddp, amp"),
    ],
)
def test_senseless_sets_are_refused(techniques: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(techniques)


def test_command_line_lists_writes_and_never_overwrites(tmp_path) -> None:
    listing = start("compose.py").stdout
    assert [line.split()[0] for line in listing.splitlines()] == list(TECHNIQUES)
    output = tmp_path / "my_train.py"
    assert start("compose.py", "ddp", "amp", "-o", str(output)).returncode == 0
    assert "`torchrun --standalone --nproc_per_node=2 my_train.py`" in output.read_text()
    again = start("compose.py", "ddp", "amp", "-o", str(output))
    assert again.returncode == 1
    assert "exists already" in again.stderr
