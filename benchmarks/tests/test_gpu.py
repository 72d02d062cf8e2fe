"""`python -m benchmarks gpu` without a GPU: its failed rows."""

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.records import Subject, read
from tests.helpers import refused


def test_a_row_that_the_cpu_decoded_has_failed(monkeypatch) -> None:
    batches = iter([(torch.zeros(2, 3, 8, 8), torch.zeros(2))] * 9)
    source = gpu.Source(Subject("loader=dali"), lambda: batches, decodes=True)
    monkeypatch.setattr(gpu, "ON_GPU", True)
    monkeypatch.setattr(gpu, "runs_nvjpeg", lambda batches: False)
    with pytest.raises(RuntimeError, match="decoded on the CPU"):
        gpu.measured(source, gpu.ALONE, 1e-9)


@pytest.mark.slow
def test_a_failed_row_is_written_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "DATA", tmp_path / "data")
    monkeypatch.setattr(gpu, "constant", lambda: iter([]))
    path, words = tmp_path / "gpu.csv", ["constant", "alexnet, loader=pytorch"]
    with refused("AlexNet, constant batch; ResNet-50, constant batch"):
        gpu.main(path, words, 0.01, [])
    rows = read(path)
    outcomes = {(row.case, row.subject): row.repeats for row in rows if row.quantity == "speed"}
    names = [("AlexNet", "constant batch"), ("ResNet-50", "constant batch")]
    assert outcomes == {**dict.fromkeys(names, 0), ("AlexNet", "loader=pytorch"): 1}
    assert all(row.note.startswith("failed") for row in rows if not row.repeats)
    with refused("rows=here"):
        gpu.main(path, ["here"], 0.01, [])
