"""A trace of some steps of a run on each rank, and of its memory."""

from pathlib import Path

import pytest

from tests.helpers import has_ranks
from tests.processes import train
from tests.results import summary_of, trace_of
from tests.rows import rows

SMALL = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=1000"]
SMALL += ["log.images=0", "optimizer.warmup_epochs=0"]


def num_steps(run: Path, rank: int = 0) -> int:
    """Steps of the optimizer in a trace."""
    return sum(name.startswith("Optimizer.step") for name in trace_of(run, rank))


@pytest.mark.parametrize("script", ["train.py", *rows("train_ddp.py")])
def test_each_rank_writes_a_trace_of_the_steps_that_are_asked_for(script, tmp_path: Path) -> None:
    run, ranks = tmp_path / "run", range(1 + has_ranks(script))
    said = train(script, run, *SMALL, "max_steps=8", "profile.steps=[2,3]")
    assert f"open {run / 'trace-rank0.json.gz'}" in said
    assert [num_steps(run, rank) for rank in ranks] == [3] * len(ranks)
    assert summary_of(run)["seconds"]["profile"] > 0
    # Of its second step on, and it ends after three.
    more = ["resume=auto", "max_steps=11", "profile.steps=[1,9]", "profile.memory=true"]
    train("train.py", run, *SMALL, *more)
    assert num_steps(run) == 2
    assert "[memory]" in trace_of(run)
