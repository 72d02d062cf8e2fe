"""Tests of faults; lines that hit runs, and which samples a run has seen."""

import json
from pathlib import Path

NUM_TRAIN = 64
NUM_STEPS = 16

WORKERS = "import psutil, tests.processes as p; workers = p.workers_of(psutil.Process()); "
"""Python in the training loop that finds the workers of the training process."""


def hit(step: int, rank: int, action: str) -> list[str]:
    """Lines of the loop that do something in a step of a rank, but not after a resume."""
    return [
        f"if (step, rank) == ({step}, {rank}) and not os.path.exists('hit-{step}'):",
        f"    open('hit-{step}', 'x').close()",
        f"    {action}",
    ]


def recording(path: Path) -> list[str]:
    """Lines of the loop by which each rank writes its samples by step to a file."""
    return [
        f"with open({str(path)!r}, 'a') as file:",
        "    samples = [step, rank, train_loader.last_rows['sample'].tolist()]",
        "    file.write(f'{samples}\\n')",
    ]


def seen_in(path: Path) -> dict[int, list[int]]:
    """The global batch of each step, its ranks' samples in turn, as the plan deals them."""
    ranks: dict[int, dict[int, list[int]]] = {}
    for line in path.read_text().splitlines():
        step, rank, samples = json.loads(line)
        assert rank not in ranks.setdefault(step, {})
        ranks[step][rank] = samples
    seen = dict[int, list[int]]()
    for step, by_rank in ranks.items():
        turns = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        seen[step] = [sample for turn in turns for sample in turn]
    return seen
