"""A trace of some steps of a run on each rank, with their phases as named ranges."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from runtime.profile import ProfiledTiming
from tests.helpers import make_config, summary_of, train

SMALL = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=1000"]
SMALL += ["log.images=0", "optimizer.warmup_epochs=0"]
PHASES = ["data wait", "forward", "loss and backward", "optimizer", "record"]


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


def test_a_trace_has_the_phases_of_each_micro_batch_and_step_in_turn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "accumulate_steps=2", "max_steps=8", "profile.steps=[2,3]"]
    said = train("train_accumulate.py", run, *options)
    path = run / "trace-rank0.json.gz"
    assert f"open {path}, a trace of 3 steps" in said
    found = ranges(path)
    assert [name for name, *_ in found] == [*PHASES[:3], *PHASES[1:]] * 3
    for (_, _, end), (_, begin, _) in pairwise(found):
        assert begin >= end - 0.01
    assert summary_of(run)["seconds"]["profile"] > 0


def test_each_rank_and_a_run_that_goes_on_write_traces_of_their_own_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("train_ddp.py", run, *SMALL, "max_steps=2", "profile.steps=[0,1]")
    traces = [run / f"trace-rank{rank}.json.gz" for rank in (0, 1)]
    assert [names(path) for path in traces] == [PHASES] * 2
    # Of its second step on, and it ends after three.
    options = [*SMALL, "resume=auto", "max_steps=5", "profile.steps=[1,9]"]
    train("train.py", run, *options)
    assert names(traces[0]) == PHASES * 2


def test_a_run_that_ends_before_its_trace_begins_is_told(tmp_path: Path, caplog) -> None:
    cfg = make_config(*SMALL, "profile.steps=[2,1]")
    times = ProfiledTiming(cfg, nn.Linear(1, 1), tmp_path, 0, torch.device("cpu"))
    for _ in range(2):
        with times.data_wait():
            pass
        times.step(1)
        times.end_step()
    times.end()
    assert "profile.steps=[2,1]: this process made only 2 steps" in caplog.text
    assert not list(tmp_path.iterdir())
