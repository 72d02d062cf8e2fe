"""Planted faults are small changes of the product that Python can read."""

import ast
from pathlib import Path

from benchmarks.faults import draw


def test_the_same_seed_draws_the_same_faults_each_at_one_place() -> None:
    faults = [*draw(8, 3, ("models", "tasks"))]
    assert faults == [*draw(8, 3, ("models", "tasks"))]
    assert faults != [*draw(8, 4, ("models", "tasks"))]
    for fault in faults:
        text = Path(fault["file"]).read_text()
        assert text.count(fault["old"]) == 1
        changed = text.replace(fault["old"], fault["new"])
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), fault
