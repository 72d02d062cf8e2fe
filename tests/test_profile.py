"""A trace of some steps of a run on each rank, with their phases as named ranges."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from conf.cli import explain
from tests.helpers import make_config, summary_of, train

SMALL = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=1000"]
SMALL += ["log.images=0", "optimizer.warmup_epochs=0"]
PHASES = ("data wait", "forward", "loss and backward", "optimizer", "record")


def ranges(path: Path) -> list[tuple[str, float, float]]:
    """Name, begin and end in microseconds of each phase in a trace, by begin."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted(
        ((e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") in PHASES),
        key=lambda phase: phase[1],
    )


def names(path: Path) -> list[str]:
    return [name for name, *_ in ranges(path)]


def test_a_trace_has_the_phases_of_each_step_one_after_the_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train("train.py", run, *SMALL, "max_steps=8", "profile.steps=[2,3]")
    path = run / "trace-rank0.json.gz"
    assert f"open {path}, a trace of 3 steps" in said
    found = ranges(path)
    assert [name for name, *_ in found] == [*PHASES] * 3
    for (_, _, end), (_, begin, _) in pairwise(found):
        assert begin >= end - 0.01
    assert summary_of(run)["seconds"]["profile"] > 0


def test_each_rank_and_a_run_that_goes_on_write_traces_of_their_own_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "profile.steps=[0,1]", "resume=auto"]
    train("train_ddp.py", run, *options, "max_steps=2")
    assert len(list(run.glob("trace-*"))) == 2
    for path in run.glob("trace-*"):
        assert names(path) == [*PHASES]
        path.unlink()
    train("train_ddp.py", run, *options, "max_steps=3")
    assert [names(path) for path in run.glob("trace-*")] == [[*PHASES]] * 2


def test_micro_batches_have_their_own_phases(tmp_path: Path) -> None:
    options = [*SMALL, "profile.steps=[0,1]", "accumulate_steps=2", "max_steps=1"]
    train("train_accumulate.py", tmp_path / "run", *options)
    found = names(tmp_path / "run" / "trace-rank0.json.gz")
    passes = ["forward", "loss and backward"]
    assert [name for name in found if name in passes] == passes * 2


@pytest.mark.parametrize(("steps", "num_recorded"), [("[1,9]", 1), ("[2,1]", 0), ("[5,1]", 0)])
def test_a_run_that_ends_before_writes_what_there_is(
    tmp_path: Path, steps: str, num_recorded: int
) -> None:
    run = tmp_path / "run"
    said = train("train.py", run, *SMALL, "max_steps=2", f"profile.steps={steps}")
    traces = [names(path).count("optimizer") for path in run.glob("trace-*")]
    assert traces == [num_recorded] * bool(num_recorded)
    assert (f"profile.steps={steps}: " in said) == (not num_recorded)


@pytest.mark.parametrize("steps", ["[5]", "[0,0]", "[-1,2]", "[1,2,3]", "[a,b]", "[]", "[1,0.5]"])
def test_rubbish_is_refused(steps: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        make_config(f"profile.steps={steps}")
    assert "profile.steps" in (explain(raised.value) or "")
