"""Overhead of the training loop over forward, backward and step, compared with Lightning.

All loops train the same model on the same synthetic batches, clip the gradient norm, and write a
log, a progress bar and checkpoints; none validates. The time from one training forward pass to the
next is measured.
"""

import io
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks.compare import endless
from benchmarks.measure import CountItems, measure
from benchmarks.records import Subject, now, record
from benchmarks.tables import BARE, STEP_TIME
from conf.cli import load_config
from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import build_optimizer, seed_everything, setup
from tasks import build_task

PEERS = {"lightning": "lightning"}
# Long enough for imports, memory pools and the first progress bar.
WARMUP_S = 0.5
NUM_EPOCHS = 10**6  # more than are ever run
WINDOW_FACTOR = 4  # longer samples than elsewhere, to include checkpoints and log steps

AddStepCounter = Callable[[nn.Module], nn.Module]
"""Adds a hook to a model that counts its training steps; returns the model."""


def main(path: Path, repeats: int, window_s: float, overrides: list[str]) -> None:
    """Measure all loops in turns, and append their rows to a file."""
    work = {name: partial(train_with, name, ("loader=synthetic", *overrides)) for name in LOOPS}
    found = measure(work, WARMUP_S, WINDOW_FACTOR * window_s, repeats)
    date = now()
    for name, outcome in found.items():
        note = f"not measured: {outcome}" if isinstance(outcome, str) else ""
        times = [] if isinstance(outcome, str) else [1000 / speed for speed in outcome]
        case = " ".join(overrides) or "default configuration"
        record(path, "loop_overhead", case, Subject(name), {(STEP_TIME, "ms"): times}, note, date)


def train_with(name: str, overrides: tuple[str, ...], count_items: CountItems) -> None:
    """Train with the loop `name` until `count_items`, called in each step, ends it."""

    def add_step_counter(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: count_items(1) if model.training else None)
        return model

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cfg = load_config([*overrides, f"output_dir={folder}/run", "max_steps=null"])
        cfg.epochs = NUM_EPOCHS
        device = setup(cfg)
        sys.stdout, sys.stderr = Terminal(), Terminal()
        LOOPS[name](cfg, device, add_step_counter, Path(folder))


def parts(cfg: Config, device: torch.device) -> tuple[Any, Any, nn.Module, Any, Any]:
    """Loader, task, model, optimizer and scheduler, as of train.py."""
    seed_everything(cfg.seed)
    loader = build_loaders(cfg, device)[0]
    task = build_task(cfg, loader)
    model = build_model(cfg.model, loader.in_channels, task.num_outputs).to(device)
    return loader, task, model, *build_optimizer(cfg, model, len(loader))


class Terminal(io.StringIO):
    """Output that counts as a terminal, so libraries draw progress bars, and keeps the text."""

    def isatty(self) -> bool:
        return True


def train_py(
    cfg: Config, device: torch.device, add_step_counter: AddStepCounter, folder: Path
) -> None:
    """Loop of `train.py`, with counted steps and without validation."""
    import train

    build_model = train.build_model

    def no_validation(model: nn.Module, task: Any, *_: Any) -> tuple[Tensor, tuple[()]]:
        return torch.ones(task.num_sums, dtype=torch.float64), ()

    with (
        mock.patch.object(
            train, "build_model", lambda *parts: add_step_counter(build_model(*parts))
        ),
        mock.patch.object(train, "evaluate", no_validation),
    ):
        train.main(OmegaConf.structured(cfg))


def bare(
    cfg: Config,
    device: torch.device,
    add_step_counter: AddStepCounter,
    folder: Path,
    clip: bool = False,
) -> None:
    """Loop of forward, backward and step only; `clip` adds clipping of the gradient norm."""
    loader, task, model, optimizer, _ = parts(cfg, device)
    add_step_counter(model).train()
    for inputs, targets in endless(loader):
        loss = task.loss(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def lightning(
    cfg: Config, device: torch.device, add_step_counter: AddStepCounter, folder: Path
) -> None:
    """Lightning's Trainer with TensorBoard logger, a checkpoint per epoch and progress bar."""
    package: Any = import_module("lightning")
    loggers: Any = import_module("lightning.pytorch.loggers")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loader, task, model, optimizer, scheduler = parts(cfg, device)
    add_step_counter(model)

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            loss = task.loss(self.model(batch[0]), batch[1])
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = package.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1 if device.index is None else [device.index],
        max_epochs=cfg.epochs,
        default_root_dir=folder,
        logger=loggers.TensorBoardLogger(folder),
        log_every_n_steps=cfg.log.every_steps,
        gradient_clip_val=cfg.clip_grad_norm,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


Loop = Callable[[Config, torch.device, AddStepCounter, Path], None]
LOOPS: dict[str, Loop] = {
    BARE: bare,
    "bare loop with clip_grad_norm_": partial(bare, clip=True),
    "train.py": train_py,
    "Lightning": lightning,
}
