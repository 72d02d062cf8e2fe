"""Memory and speed by technique, for docs/speed.md: `python -m benchmarks.cost`.

On a GPU: the peak memory and the speed of a run of each script. On a CPU: the peak of what PyTorch
allocates in the first two steps, besides the weights and the first batch; and the speed as a share
of the baseline's, of runs that take turns.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks import REPOSITORY

MODELS = ["resnet50", "vit_b_16"]
SCRIPTS = ["train.py", "train_amp.py amp.dtype=bfloat16", "train_accumulate.py accumulate_steps=4"]
SCRIPTS += ["train_recompute.py"]
OPTIONS = ["loader=synthetic", "data=imagefolder", "data.resize=null", "data.crop=224"]
OPTIONS += ["data.random_resized_crop=null", "data.hflip=0"]
OPTIONS += ["model=torchvision", "optimizer=adamw", "optimizer.warmup_epochs=0", "log.images=0"]
OPTIONS += ["checkpoint.best=false", "overwrite=true"]
ON_GPU = ["global_batch_size=64"]
ON_CPU = ["global_batch_size=4", "max_steps=6"]
PROFILED = ["max_steps=2", "profile.steps=[0,2]", "profile.memory=true"]
NUM_TURNS = 3


def run(arch: str, command: str, folder: Path, *options: str) -> dict[str, float]:
    """Run a script with a model, and return its `summary.json`."""
    options = (*OPTIONS, f"data.root={folder / 'data'}", f"model.arch={arch}", *options)
    start = [sys.executable, *command.split(), *options, f"output_dir={folder / 'run'}"]
    subprocess.run(start, cwd=REPOSITORY, stdout=sys.stderr, check=True)
    summary: dict[str, float] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def column_of_gpu(arch: str, folder: Path) -> list[str]:
    """Return the peak memory and the speed of a model with each script."""
    summaries = [run(arch, command, folder, *ON_GPU) for command in SCRIPTS]
    return [
        f"{x['perf/peak_memory_gib']:.1f} GiB, {x['perf/images_per_s']:,.0f} images/s"
        for x in summaries
    ]


def column_of_cpu(arch: str, folder: Path) -> list[str]:
    """Return the peak memory and the speed of a model with each script, as shares of the first."""
    peaks = []
    for command in SCRIPTS:
        run(arch, command, folder, *ON_CPU, *PROFILED)
        trace = json.loads(gzip.decompress((folder / "run" / "trace-rank0.json.gz").read_bytes()))
        events = [event for event in trace["traceEvents"] if event["name"] == "[memory]"]
        peaks.append(max(event["args"]["Total Allocated"] for event in events) / 2**20)
    turns = np.array(
        [
            [run(arch, command, folder, *ON_CPU)["perf/images_per_s"] for command in SCRIPTS]
            for _ in range(NUM_TURNS)
        ]
    )
    shares = np.median(turns / turns[:, :1], axis=0)
    return [f"{peak:,.0f} MiB, {share:.2f}x" for peak, share in zip(peaks, shares, strict=True)]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "4 images, on a CPU"
    noise = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(644 if on_gpu else 20):
            split = "val" if number < 4 else "train"
            path = Path(folder, "data", split, "ab"[number % 2], f"{number}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise).save(path)
        column = column_of_gpu if on_gpu else column_of_cpu
        columns = [[arch, *column(arch, Path(folder))] for arch in MODELS]
    names = [device, *(f"`{command}`" for command in SCRIPTS)]
    rows = [" | ".join(cells) for cells in zip(names, *columns, strict=True)]
    rows.insert(1, " | ".join(["---"] * (1 + len(MODELS))))
    table = "".join(f"| {row} |\n" for row in rows)
    page, mark = REPOSITORY / "docs" / "speed.md", "gpu" if on_gpu else "cpu"
    before, start, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    end = f"<!-- end of {mark} -->"
    page.write_text(before + start + table + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
