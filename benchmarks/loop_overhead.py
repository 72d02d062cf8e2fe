"""What a training loop costs beside forward, backward and step: ours, and those of two frameworks.

All train the same model on the same synthetic batches, clip the norm of its gradients as the
configuration says, and keep a log, a progress bar and checkpoints; validation is left out everywhere.
What is timed is the same for all: from one training forward pass of the model to the next one.
"""

import io
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks.baselines import optional
from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import endless, make_config, parts
from benchmarks.turns import Count
from conf.schema import Config
from runtime.libc import keep_freed_memory

BARE, UNKEPT = "bare loop", "bare loop with malloc's own settings"
# Imports, memory pools and the first progress bar are over after so long.
UNTIMED_S = 0.5
ENDLESS = 10**6  # epochs
# Checkpoints and log points must be part of a sample.
WINDOWS = 4  # of others' samples, in one sample

Watch = Callable[[nn.Module], nn.Module]
"""Has each training step of a model counted."""


def main(run: Run) -> None:
    """Runs side by side, each of which gives one sample of the time per step."""
    programs = {
        Subject(name): partial(train_with, name, run.overrides, run.device) for name in LOOPS
    }
    sizes = replace(run.sizes, warmup_s=UNTIMED_S, window_s=WINDOWS * run.sizes.window_s)
    replace(run, sizes=sizes).compare("loop_overhead", run.title, programs, fresh=True)


def train_with(name: str, overrides: tuple[str, ...], device: torch.device, count: Count) -> None:
    """Train with a loop until `count`, which it calls for each step, ends it."""

    def watch(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: count(1) if model.training else None)
        return model

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cfg = make_config(
            *overrides, "loader=synthetic", f"output_dir={folder}/run", "max_steps=null"
        )
        cfg.epochs = ENDLESS
        if name != UNKEPT and device.type == "cpu":
            keep_freed_memory()
        sys.stdout, sys.stderr = Terminal(), Terminal()
        LOOPS[name](cfg, device, watch, Path(folder))


class Terminal(io.StringIO):
    """A terminal that nobody looks at, so that progress bars are drawn."""

    def isatty(self) -> bool:
        return True


def ours(cfg: Config, device: torch.device, watch: Watch, folder: Path) -> None:
    """`train.py` itself, but that its model is watched and its validation is left out."""
    import train

    build_model = train.build_model

    def no_validation(model: nn.Module, task: Any, *_: Any) -> tuple[Tensor, tuple[()]]:
        return torch.ones(task.num_sums, dtype=torch.float64), ()

    with (
        mock.patch.object(train, "build_model", lambda *parts: watch(build_model(*parts))),
        mock.patch.object(train, "evaluate", no_validation),
    ):
        train.main(OmegaConf.structured(cfg))


def bare(cfg: Config, device: torch.device, watch: Watch, folder: Path, clip: bool = False) -> None:
    """Forward, backward and step, and with `clip` the norm of the gradients, and nothing else."""
    loader, task, model, optimizer, _ = parts(cfg, device)
    watch(model).train()
    for inputs, targets in endless(loader):
        loss = task.loss(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def lightning(cfg: Config, device: torch.device, watch: Watch, folder: Path) -> None:
    """Lightning's Trainer with its TensorBoard logger, checkpoint per epoch and progress bar."""
    package = optional("lightning", "lightning")
    loggers = optional("lightning.pytorch.loggers", "lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loader, task, model, optimizer, scheduler = parts(cfg, device)
    watch(model)

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


def accelerate(cfg: Config, device: torch.device, watch: Watch, folder: Path) -> None:
    """accelerate around a plain loop, with its TensorBoard tracker and checkpoint per epoch."""
    package = optional("accelerate", "accelerate")
    from tqdm import tqdm

    loader, task, model, optimizer, scheduler = parts(cfg, device)
    watch(model)
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


Loop = Callable[[Config, torch.device, Watch, Path], None]
LOOPS: dict[str, Loop] = {
    BARE: bare,
    "bare loop with clip_grad_norm_": partial(bare, clip=True),
    UNKEPT: bare,
    "train.py": ours,
    "Lightning": lightning,
    "accelerate": accelerate,
}
