"""A trace of some steps of a run on each rank."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import has_ranks, summary_of, train
from tests.parts import rows_of

SMALL = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=1000"]
SMALL += ["log.images=0", "optimizer.warmup_epochs=0"]


def num_steps(path: Path) -> int:
    """Steps of the optimizer in a trace."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step") for event in events)


@pytest.mark.parametrize("script", ["train.py", *rows_of("SCRIPTS")])
def test_each_rank_writes_a_trace_of_the_steps_that_are_asked_for(script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train(script, run, *SMALL, "max_steps=8", "profile.steps=[2,3]")
    traces = [run / f"trace-rank{rank}.json.gz" for rank in range(1 + has_ranks(script))]
    assert f"open {traces[0]}" in said
    assert [num_steps(path) for path in traces] == [3] * len(traces)
    assert summary_of(run)["seconds"]["profile"] > 0
    # Of its second step on, and it ends after three.
    train("train.py", run, *SMALL, "resume=auto", "max_steps=11", "profile.steps=[1,9]")
    assert num_steps(traces[0]) == 2
