"""Use a run's model on a folder of images, which need no labels, or on new samples of own data.

    python predict.py run=outputs/mine data.root=PHOTOS out=predictions.csv
    python predict.py run=outputs/restorer data.root=PHOTOS out=DIR    # writes images or masks
    python predict.py run=outputs/mine split=val out=predictions.csv   # the run's own metrics again
    python predict.py run=outputs/mine split=test out=test.csv         # those of the test split
    torchrun --standalone --nproc_per_node=2 predict.py run=RUN data.root=PHOTOS out=predictions.csv

Configuration, class names and best weights are the run's; any key can be changed, such as
`loader=dali`, `device=cpu` or `data.crop=null`. The table has one row for each image, in the order
of their names; for a file that cannot be read, its column `error` gives the reason. The last line
counts the files whose endings are not those of images. The metrics of a split are printed and
written beside the table, as `predictions.metrics.json`.
"""

import csv
import json
import os
import sys
from collections import ChainMap
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from tqdm import tqdm

from conf.cli import parse_options
from conf.errors import UserError, counted
from conf.files import write_atomically
from loaders import build_loaders
from loaders.predict import build_new_loader
from runtime import run_command, setup
from runtime.process_group import ProcessGroup
from runtime.trained import read_trained
from tasks import build_task

SPLITTING = ("data.fold=", "data.num_folds=", "data.split_seed=", "data.val_")


def main() -> None:
    options, overrides = parse_options(__doc__, sys.argv[1:], run=None, out=None, split="")
    out, split = Path(options["out"]), options["split"]
    for override in overrides:
        if split in ("val", "test") and override.lstrip("+").startswith(SPLITTING):
            raise UserError(
                f"{override}: split={split} is that of the run, which has trained on the other "
                "samples; leave it out"
            )
    trained = read_trained(Path(options["run"]), overrides)
    cfg = trained.cfg

    # processes: this one, or those that torchrun has started
    if "LOCAL_RANK" in os.environ:
        distributed = import_module("runtime.distributed")  # one process needs none
        device = setup(cfg, distributed.local_rank())
        group: ProcessGroup = distributed.init_process_group(cfg, device)
    else:
        device, group = setup(cfg), ProcessGroup()

    # data and task
    if split in ("val", "test"):
        train_loader, loader = build_loaders(cfg, device, group.rank, group.world_size, split)
        trained.check_data(loader)
        task = build_task(cfg, train_loader)
    elif split:
        raise UserError(f"split={split} is unknown; use val, test, or data.root=FOLDER without it")
    elif not any(override.startswith("data.root=") for override in overrides):
        raise UserError("data.root= is missing; give the place of new samples, or split=val")
    else:
        cfg.loss.weights = None
        loader = build_new_loader(
            cfg, trained.target, trained.facts["in_channels"], device, group.rank, group.world_size
        )
        task = build_task(cfg, loader)
    makes_images = "image" in task.columns
    path = out / "predictions.csv" if makes_images else out
    if makes_images and out.resolve() == Path(cfg.data.root).resolve():
        raise UserError(
            f"out={out} is data.root, whose images would be replaced; use another folder"
        )
    if path.is_dir():
        raise UserError(f"out={path} is a folder; give a file, such as out={path}.csv")

    # model
    model = trained.build_model(task).to(device).eval()

    # rows of the table by sample: predictions and error
    no_values = [""] * len(task.columns)
    rows: dict[int, tuple[str, ...]] = {}
    totals = torch.zeros(task.num_sums, dtype=torch.float64, device=device)
    precision = torch.autocast(device.type, trained.precision, trained.precision != torch.float32)
    bar = tqdm(loader, "predicting", leave=False, disable=None if group.rank == 0 else True)
    with torch.no_grad(), precision:
        for inputs, targets in bar:
            outputs = model(inputs)
            if split:
                totals += task.sums(outputs, targets)
            for sample, values in zip(loader.last_samples, task.table_rows(outputs), strict=True):
                file = image_file(loader.info.name_of(sample), cfg.data.root, out)
                rows[sample] = (*(cell(value, file) for value in values), "")
    rows |= {sample: (*no_values, reason) for sample, reason in loader.bad.items()}

    # from all ranks
    if group.world_size > 1:
        dist.all_reduce(totals)
    table = dict(ChainMap(*group.gather(rows)))
    if group.rank != 0:
        return

    # the table, in the order of the files
    lines = [(loader.info.name_of(sample), *table[sample]) for sample in sorted(table)]
    lines += [(name, *no_values, reason) for name, reason in loader.info.left_out.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of files may hold bytes that are no text.
    with (
        write_atomically(path) as temporary,
        temporary.open("w", newline="", errors="surrogateescape") as text,
    ):
        csv.writer(text).writerow(("path", *task.columns, "error"))
        csv.writer(text).writerows(sorted(lines) if loader.info.left_out else lines)
    if split:
        metrics = {f"{split}/{name}": value for name, value in task.metrics(totals).items()}
        print(json.dumps(metrics))
        with write_atomically(path.with_suffix(".metrics.json")) as temporary:
            temporary.write_text(json.dumps(metrics, indent=2) + "\n")
    num_broken = sum(line[-1] != "" for line in lines)
    last = f"{counted(len(lines), 'sample')}, {num_broken} of them broken: {path}"
    notes = () if split else loader.info.description
    print("; ".join([last, f"weights {trained.weights_file}", *notes]))


def image_file(name: str, root: str, out: Path) -> Path:
    """Return the PNG file below `out` for an input `name`, whose place is that below `root`."""
    path, root = Path(name), os.path.normpath(root)  # as in names
    place = path.relative_to(root if path.is_relative_to(root) else path.anchor)
    # Beside a.png, a.jpg becomes a.jpg.png.
    return out / place if place.suffix == ".png" else out / f"{place}.png"


def cell(value: Any, file: Path) -> str:
    """Return a value of the table as text; a picture is written to the file."""
    if isinstance(value, Image.Image):
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(file) as temporary:
            value.save(temporary)
        return str(file)
    return value if isinstance(value, str) else f"{value:.6g}"


if __name__ == "__main__":
    run_command(main)
