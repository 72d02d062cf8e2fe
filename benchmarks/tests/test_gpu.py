"""`python -m benchmarks gpu` without a GPU: its judgement of traces and its failed rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decoder, gpu
from benchmarks.gpu_loaders import ALONE, DRY, Source
from benchmarks.records import Subject, read
from benchmarks.run import Run

CUDA_KERNEL = "void nvjpeg::dctQuantInvJpegKernel<ushort2, 1, 32, 8>(nvjpeg::InvDctParams)"
COLOURS = "void nvjpeg::ycbcr_to_format_kernel_roi<(nvjpegChromaSubsampling_t)2>(unsigned char)"
RESIZING = "void dali::kernels::resampling::BatchedSeparableResampleKernel<1>()"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([RESIZING, COLOURS, CUDA_KERNEL], (True, "which decode")),
        ([RESIZING, COLOURS], (True, "none of which decodes")),  # the hardware does
        ([RESIZING], (False, "no kernel of nvJPEG")),
        ([], (True, "unknown")),
    ],
)
def test_a_trace_shows_what_decoded(kernels: list[str], expected: tuple[bool, str]) -> None:
    events: list[dict[str, Any]] = [{"cat": "kernel", "name": name} for name in kernels]
    copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"}
    events += [copy | {"args": {"bytes": 40_000}} for _ in range(8)]
    is_right, text = decoder.judge([*events, {"ph": "M"}], 8)
    assert is_right == expected[0]
    assert expected[1] in text


def test_a_row_that_the_cpu_decoded_has_failed() -> None:
    batches = iter([(torch.zeros(2, 3, 8, 8), torch.zeros(2))] * 9)
    source = Source(Subject("loader=dali"), lambda: batches, decoder=(False, "no kernel"))
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu.measured(torch.device("cpu"), replace(DRY, seconds=1e-9), source, ALONE)


def test_a_failed_row_is_written_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_loaders.constant", lambda *_: iter([]))
    run = Run(tmp_path, rows=("constant", "alexnet, loader=synthetic"), data_dir=tmp_path / "data")
    with pytest.raises(RuntimeError, match="constant batch"):
        gpu.main(run)
    rows = read(tmp_path / "gpu.csv")
    outcomes = {(row.case, row.subject): row.repeats for row in rows}
    names = [("AlexNet", "constant batch"), ("ResNet-50", "constant batch")]
    assert outcomes == {**dict.fromkeys(names, 0), ("AlexNet", "loader=synthetic"): 1}
    assert all(row.note.startswith("failed") for row in rows if not row.repeats)
    with pytest.raises(SystemExit, match="rows=here"):
        gpu.main(replace(run, rows=("here",)))
