"""Memory and speed by technique, for docs/cost_of_techniques.md: `python -m benchmarks.cost`.

On a GPU: the peak memory and the speed of a run of each script. On a CPU: the peak of the memory
that PyTorch allocates in the first two steps, besides the weights and the first batch.
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

MODELS = {"ResNet-50": "resnet50", "ViT-B/16": "vit_b_16"}
SCRIPTS = ["train.py", "train_amp.py amp.dtype=bfloat16", "train_accumulate.py accumulate_steps=4"]
SCRIPTS += ["train_recompute.py"]
OPTIONS = ["loader=synthetic", "data=imagefolder", "data.resize=null", "data.crop=224"]
OPTIONS += ["model=torchvision", "optimizer=adamw", "optimizer.warmup_epochs=0", "log.images=0"]
ON_GPU, ON_CPU = ["global_batch_size=64"], ["global_batch_size=4", "epochs=1"]
ON_CPU += ["profile.steps=[0,2]", "profile.memory=true"]


def measured(arch: str, command: str, folder: Path) -> str:
    """Run a script with a model; return a cell of the table."""
    run, on_gpu = folder / "run", torch.cuda.is_available()
    options = [*OPTIONS, *(ON_GPU if on_gpu else ON_CPU), f"data.root={folder / 'data'}"]
    options += [f"output_dir={run}", "overwrite=true", f"model.arch={arch}"]
    start = [sys.executable, *command.split(), *options]
    subprocess.run(start, cwd=REPOSITORY, stdout=sys.stderr, check=True)
    if not on_gpu:
        events = json.loads(gzip.decompress((run / "trace-rank0.json.gz").read_bytes()))
        peak = max(
            e["args"]["Total Allocated"]
            for e in events["traceEvents"]
            if e.get("name") == "[memory]"
        )
        return f"{peak / 2**20:,.0f} MiB"
    values = json.loads((run / "summary.json").read_text())
    return f"{values['perf/peak_memory_gib']:.1f} GiB, {values['perf/images_per_s']:,.0f} images/s"


def main() -> None:
    on_gpu = torch.cuda.is_available()
    rows = [[torch.cuda.get_device_name() if on_gpu else "4 images, on a CPU", *MODELS]]
    noise = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(644 if on_gpu else 12):
            split = "val" if number < 4 else "train"
            path = Path(folder, "data", split, "ab"[number % 2], f"{number}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise).save(path)
        for command in SCRIPTS:
            if (REPOSITORY / command.split()[0]).exists():
                cells = [measured(arch, command, Path(folder)) for arch in MODELS.values()]
                rows.append([f"`{command}`", *cells])
    page, mark = REPOSITORY / "docs" / "cost_of_techniques.md", "gpu" if on_gpu else "cpu"
    before, start, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    end = f"<!-- end of {mark} -->"
    lines = [f"| {' | '.join(row)} |\n" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    page.write_text(before + start + "".join(lines) + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
