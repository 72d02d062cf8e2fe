"""Tests of faults; runs that can be hit, scripts with a fault, and comparisons of runs."""

import json
import re
from pathlib import Path

from tests.helpers import folder_with
from tests.processes import wait_for
from tests.results import steps_saved

NUM_TRAIN = 64
NUM_STEPS = 16

WORKERS = "import psutil, tests.processes as p; workers = p.workers_of(psutil.Process()); "
"""Python in the training loop that finds the workers of the training process."""

LOOP = re.compile(r"(^ {8}for inputs, targets in .*run\.batches\(.*\n)", re.MULTILINE)


def script_with(folder: Path, script: str, *lines: str) -> Path:
    """A folder like the repository's, with these lines put in at the top of the training loop.

    `step` counts the steps from 1 there, and `rank` is the number of the process.
    """
    path = folder_with(folder, script) / script
    added = ["step, rank = run.step_number, run.group.rank", *lines]
    indented = "".join(f"            {line}\n" for line in added)
    before, loop, after = LOOP.split(path.read_text())
    path.write_text(f"import os\nimport time\n\nimport torch\n{before}{loop}{indented}{after}")
    return folder


def hit(step: int, rank: int, action: str) -> list[str]:
    """Lines for `script_with()` that do something in a step of a rank, but not after a resume."""
    return [
        f"if (step, rank) == ({step}, {rank}) and not os.path.exists('hit-{step}'):",
        f"    open('hit-{step}', 'x').close()",
        f"    {action}",
    ]


def wait_for_step(output_dir: Path, step: int) -> None:
    """Until a checkpoint of this step or a later one is there."""
    wait_for(lambda: max(steps_saved(output_dir), default=0) >= step, f"step {step}")


def recording(folder: Path, script: str, *lines: str) -> Path:
    """The script with these lines; each rank writes its samples by step to `<folder>/seen.txt`."""
    seen = folder / "seen.txt"
    return script_with(
        folder,
        script,
        f"with open({str(seen)!r}, 'a') as file:",
        "    samples = [step, rank, train_loader.last_rows['sample'].tolist()]",
        "    file.write(f'{samples}\\n')",
        *lines,
    )


def seen_by(folder: Path) -> dict[int, list[int]]:
    """The global batch of each step, its ranks' samples in turn, as the plan deals them."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for line in (folder / "seen.txt").read_text().splitlines():
        step, rank, samples = json.loads(line)
        assert rank not in by_step.setdefault(step, {})
        by_step[step][rank] = samples
    turns = {
        step: zip(*[ranks[rank] for rank in sorted(ranks)], strict=True)
        for step, ranks in by_step.items()
    }
    return {step: [sample for turn in turns[step] for sample in turn] for step in turns}
