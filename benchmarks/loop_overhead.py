"""Overhead of the training loop over forward, backward and step, compared with other frameworks.

All loops (those of Lightning and accelerate, too) train the same model on the same synthetic
batches, clip the gradient norm, and write a log, a progress bar and checkpoints; none validates.
The time from one training forward pass to the next is measured. Then `train.py` and
`plain/train.py`, with default settings and the same number of weights, both on the embedded digits.
"""

import importlib.util
import io
import logging
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks import REPOSITORY
from benchmarks.baselines import optional
from benchmarks.interleave import CountItems
from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import endless, make_config, parts
from conf.schema import Config
from runtime.libc import keep_freed_memory

BARE, DEFAULT_MALLOC = "bare loop", "bare loop with malloc's own settings"
PLAIN = "plain/train.py"
# Long enough for imports, memory pools and the first progress bar.
WARMUP_S = 0.5
NUM_EPOCHS = 10**6  # more than are ever run
WINDOW_FACTOR = 4  # longer samples than elsewhere, to include checkpoints and log steps

AddStepCounter = Callable[[nn.Module], nn.Module]
"""Adds a hook to a model that counts its training steps; returns the model."""


def main(run: Run) -> None:
    """Measure all loops alternately; each process gives one sample of the time per step."""
    sizes = replace(run.sizes, warmup_s=WARMUP_S, window_s=WINDOW_FACTOR * run.sizes.window_s)
    run, synthetic = replace(run, sizes=sizes), (*run.overrides, "loader=synthetic")
    for case, names, overrides in (
        (run.title, [name for name in LOOPS if name != PLAIN], synthetic),
        ("digits, one file of plain PyTorch", [PLAIN, "train.py"], ()),
    ):
        work = {Subject(name): partial(train_with, name, overrides, run.device) for name in names}
        run.compare("loop_overhead", case, work, fresh=True)


def train_with(
    name: str, overrides: tuple[str, ...], device: torch.device, count_items: CountItems
) -> None:
    """Train with the loop `name` until `count_items`, called in each step, ends it."""

    def add_step_counter(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: count_items(1) if model.training else None)
        return model

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cfg = make_config(*overrides, f"output_dir={folder}/run", "max_steps=null")
        cfg.epochs = NUM_EPOCHS
        if name != DEFAULT_MALLOC and device.type == "cpu":
            keep_freed_memory()
        sys.stdout, sys.stderr = Terminal(), Terminal()
        LOOPS[name](cfg, device, add_step_counter, Path(folder))


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


def plain(
    cfg: Config, device: torch.device, add_step_counter: AddStepCounter, folder: Path
) -> None:
    """Script `plain/train.py`, with counted steps and without evaluation."""
    spec: Any = importlib.util.spec_from_file_location("plain_train", REPOSITORY / PLAIN)
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    build_model = script.build_model
    args = Namespace(data=REPOSITORY / "data" / "mnist_mini.npz", out=folder / "run", seed=cfg.seed)
    args.epochs, args.batch_size, args.lr = cfg.epochs, cfg.global_batch_size, 0.003
    args.save_every = 100
    script.build_model = lambda: add_step_counter(build_model())
    script.evaluate = lambda *_: (0.0, 0.0)
    script.main(args)


def lightning(
    cfg: Config, device: torch.device, add_step_counter: AddStepCounter, folder: Path
) -> None:
    """Lightning's Trainer with TensorBoard logger, a checkpoint per epoch and progress bar."""
    package = optional("lightning", "lightning")
    loggers = optional("lightning.pytorch.loggers", "lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loader, task, model, optimizer, scheduler = parts(cfg, device)
    add_step_counter(model)

    class Module(package.LightningModule):  # type: ignore[name-defined]
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


def accelerate(
    cfg: Config, device: torch.device, add_step_counter: AddStepCounter, folder: Path
) -> None:
    """accelerate in a plain loop with TensorBoard, progress bar and a checkpoint per epoch."""
    package = optional("accelerate", "accelerate")
    from tqdm import tqdm

    loader, task, model, optimizer, scheduler = parts(cfg, device)
    add_step_counter(model)
    accelerator = package.Accelerator(
        cpu=device.type == "cpu", log_with="tensorboard", project_dir=str(folder)
    )
    accelerator.init_trackers("run")
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model.train()
    step = 0
    for _ in range(cfg.epochs):
        for inputs, targets in tqdm(loader, leave=False):
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % cfg.log.every_steps == 0:
                accelerator.log({"train/loss": loss.item()}, step=step)
        accelerator.save_state(str(folder / "checkpoint"))


Loop = Callable[[Config, torch.device, AddStepCounter, Path], None]
LOOPS: dict[str, Loop] = {
    BARE: bare,
    "bare loop with clip_grad_norm_": partial(bare, clip=True),
    DEFAULT_MALLOC: bare,
    "train.py": train_py,
    PLAIN: plain,
    "Lightning": lightning,
    "accelerate": accelerate,
}
