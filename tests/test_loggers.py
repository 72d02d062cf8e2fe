"""A resumed run continues the same log, and goes on without a logger that fails; traces."""

from pathlib import Path

import pytest
import torch

from conf.names import find
from runtime.loggers import Logger
from tests.helpers import has_ranks
from tests.processes import train
from tests.results import scalars_of, summary_of, trace_of
from tests.rows import rows

SMALL = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=1000"]
SMALL += ["log.every_steps=1", "optimizer.warmup_epochs=0"]


def write_log(name: str, run: Path, steps: range) -> Logger:
    """Write a log of these steps."""
    new = find("runtime.loggers", name, "log.to", "{}Logger")
    logger: Logger = new(run, {"global_batch_size": 8}, steps[0] - 1)
    for step in steps:
        logger.log({"train/loss": 1 / step}, step)
    logger.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])
    return logger


def rows_of_losses(*steps: int) -> list[str]:
    return ["step,name,value", *(f"{step},train/loss,{1 / step}" for step in steps)]


def test_csv_has_one_row_per_number_and_step_and_none_that_was_cut(tmp_path: Path) -> None:
    """All is in the files at once, as if the process were killed next."""
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join([*rows_of_losses(1, 2, 3), "3,"]))  # the process was killed
    for name in ("csv", "tensorboard"):
        write_log(name, tmp_path, range(3, 6))
    assert [step for step, _ in scalars_of(tmp_path, "val/loss")] == [5]
    assert path.read_text().splitlines() == [*rows_of_losses(1, 2, 3, 4, 5), "5,val/loss,0.5"]


OWN = """
from runtime.loggers import Logger


class FullLogger(Logger):
    def __init__(self, run_dir, settings, step):
        self.file = (run_dir / "steps.txt").open("a")

    def log(self, values, step):
        if step == 4:
            raise OSError(28, "No space left on device")
        print(step, file=self.file, flush=True)


class AbsentLogger(Logger):
    def __init__(self, run_dir, settings, step):
        raise RuntimeError("no such host")
"""


def test_a_run_goes_on_without_loggers_that_fail_and_names_them_once(tmp_path) -> None:
    """It ends as if they had not failed."""
    for name in ("full", "absent"):
        (tmp_path / f"{name}.py").write_text(OWN)
    found_here = f"import runtime.loggers\nruntime.loggers.__path__.append({str(tmp_path)!r})\n"
    run, options = tmp_path / "run", ["epochs=2", "log.to=[full,absent,csv]"]
    text = train("train.py", run, *SMALL, *options, edits=[("import torch\n", found_here)])
    lost = "values are lost from here on"
    full = f"log.to=full: {lost}: OSError: [Errno 28] No space left on device (full.py:11)"
    absent = f"log.to=absent: {lost}: RuntimeError: no such host (absent.py:17)"
    assert (text.count(f"{full}\n"), text.count(f"{absent}\n")) == (1, 1)
    assert "Traceback" not in text
    steps = {int(line) for line in (run / "steps.txt").read_text().splitlines()}
    assert steps == {1, 2, 3}
    assert (run / "metrics.csv").read_text().count("train/loss") == 20


SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in rows("train_ddp.py")]


def num_steps(run: Path, rank: int = 0) -> int:
    """Steps of the optimizer in a trace."""
    return sum(name.startswith("Optimizer.step") for name in trace_of(run, rank))


@pytest.mark.parametrize("script", ["train.py", *SLOW])
def test_each_rank_writes_a_trace_of_the_steps_that_are_asked_for(script, tmp_path: Path) -> None:
    run, ranks, options = tmp_path / "run", range(1 + has_ranks(script)), [*SMALL, "log.images=0"]
    said = train(script, run, *options, "max_steps=8", "profile.steps=[2,3]")
    assert f"open {run / 'trace-rank0.json.gz'}" in said
    assert [num_steps(run, rank) for rank in ranks] == [3] * len(ranks)
    assert summary_of(run)["seconds"]["profile"] > 0
    # Of its second step on, and it ends after three.
    more = ["resume=auto", "max_steps=11", "profile.steps=[1,9]", "profile.memory=true"]
    train("train.py", run, *options, *more)
    assert num_steps(run) == 2
    assert "[memory]" in trace_of(run)
