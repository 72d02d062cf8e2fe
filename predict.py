"""Use a run's model on a folder of images, which need no labels.

    python predict.py run=outputs/mine data.root=PHOTOS out=predictions.csv
    python predict.py run=outputs/restorer data.root=PHOTOS out=DIR         # images become images
    python predict.py run=outputs/mine split=val out=predictions.csv        # the run's own metrics again
    torchrun --standalone --nproc_per_node=2 predict.py run=outputs/mine data.root=PHOTOS out=predictions.csv

Configuration, class names and best weights are the run's; any key can be changed, such as `loader=dali`,
`device=cpu` or `data.crop=null`. The table has one row for each file, in the order of their names; a file
that cannot be read is a row whose column `error` says why.
"""

import csv
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from loaders import build_loaders, build_prediction_loader
from models import build_model
from runtime import resolve_device
from runtime.checkpoint import write_atomically
from runtime.distributed import init_process_group, local_rank
from runtime.group import Alone
from runtime.trained import command_line, mistakes_in_one_line, read_trained
from tasks import build_task


@mistakes_in_one_line
def main() -> None:
    options, overrides = command_line(__doc__, run=None, out=None, split="")
    trained = read_trained(Path(options["run"]), overrides)
    cfg, out, split = trained.cfg, Path(options["out"]), options["split"]

    # processes: this one, or those that torchrun has started
    if "LOCAL_RANK" in os.environ:
        device = resolve_device(cfg.device, local_rank())
        group: Alone = init_process_group(cfg, device)
    else:
        device, group = resolve_device(cfg.device), Alone()

    # data
    broken: dict[str, str] = {}
    if split == "val":
        _, loader = build_loaders(cfg, device, group.rank, group.world_size)
    elif split:
        raise ValueError(f"split={split} is unknown; use split=val, or data.root=FOLDER without it")
    elif not any(override.startswith("data.root=") for override in overrides):
        raise ValueError("data.root= is missing; give the folder of the images, or split=val")
    else:
        loader, broken = build_prediction_loader(
            cfg, trained.classes, trained.in_channels, device, group.rank, group.world_size
        )

    # model
    task = build_task(cfg, loader.num_classes, trained.classes)
    if "image" in task.columns and out.resolve() == Path(cfg.data.root).resolve():
        raise ValueError(
            f"out={out} is data.root, whose images would be replaced; use another folder"
        )
    model = build_model(cfg.model, trained.in_channels, loader.num_classes)
    trained.load_into(model)
    model = model.to(device).eval()

    # predictions: by sample, what the table says
    rows: dict[int, tuple[str, ...]] = {}
    totals = torch.zeros(len(task.metric_names) + 1, dtype=torch.float64, device=device)
    precision = torch.autocast(device.type, trained.precision, trained.precision != torch.float32)
    bar = tqdm(loader, "predicting", leave=False, disable=None if group.rank == 0 else True)
    with torch.no_grad(), precision:
        for inputs, targets in bar:
            outputs = model(inputs)
            if split:
                totals += task.sums(outputs, targets)
            answers, images = task.rows(outputs), task.images(outputs)
            if images is not None:
                files = [
                    image_file(name, cfg.data.root, out) for name in loader.names(loader.last_rows)
                ]
                for file, image in zip(files, images.cpu(), strict=True):
                    write_image(file, image)
                answers = [(str(file), *row) for file, row in zip(files, answers, strict=True)]
            rows |= zip(loader.last_rows["sample"].tolist(), answers, strict=True)

    # from all ranks
    if group.world_size > 1:
        dist.all_reduce(totals)
    ranks = group.gather((rows, loader.sampler.bad))
    if group.rank != 0:
        return

    # the table, in the order of the files
    name_of = loader.index.name_of
    table: dict[str, tuple[str, ...]] = {}
    for rows, bad in ranks:
        table |= {name_of(sample): (*row, "") for sample, row in rows.items()}
        broken |= {name_of(sample): reason for sample, reason in bad.items()}
    table |= {name: (*[""] * len(task.columns), reason) for name, reason in broken.items()}
    names = [name_of(sample) for sample in range(len(loader.index))] if split else sorted(table)
    path = out / "predictions.csv" if "image" in task.columns else out
    write_table(path, ("path", *task.columns, "error"), [(name, *table[name]) for name in names])
    if split:
        metrics = {f"{split}/{name}": value for name, value in task.metrics(totals).items()}
        print(json.dumps(metrics))
    print(
        f"{len(names)} images, {len(broken)} of them broken: {path}; weights: {trained.weights_file}"
    )


def image_file(name: str, root: str, out: Path) -> Path:
    """The PNG file of a prediction, below `out` where its input is below `root`."""
    place = (
        Path(name).relative_to(root) if Path(name).is_relative_to(root) else Path(Path(name).name)
    )
    # Beside a.png, a.jpg becomes a.jpg.png.
    return out / place if place.suffix == ".png" else out / f"{place}.png"


def write_image(file: Path, image: Tensor) -> None:
    """Write (H, W, 1 or 3) uint8."""
    if image.shape[2] not in (1, 3):
        raise ValueError(
            f"{file} cannot be written: predictions of {image.shape[2]} channels are no pictures; use "
            "export.py, which gives all channels"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image if image.shape[2] == 3 else image[..., 0]).numpy()).save(file)


def write_table(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Write a CSV file, whole or not at all."""

    def write(temporary: Path) -> None:
        # Names of files may hold bytes that are no text.
        with temporary.open("w", newline="", errors="surrogateescape") as file:
            csv.writer(file).writerows([header, *rows])

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)


if __name__ == "__main__":
    main()
