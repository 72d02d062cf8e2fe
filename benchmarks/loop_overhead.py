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
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import train
from benchmarks.baselines import optional
from benchmarks.cases import endless, make_config, train_loader
from benchmarks.run import UNAVAILABLE, Run, Subject, now, progress, say
from benchmarks.turns import Count, measure
from conf.schema import Config
from models import build_model
from runtime.optimizer import build_optimizer
from runtime.setup import resolve_device, seed_everything
from runtime.tasks import build_task

OURS, BARE = "train.py", "bare loop"
CLIPPED, UNKEPT = "bare loop with clip_grad_norm_", "bare loop with malloc's own settings"
LIGHTNING, ACCELERATE = "Lightning", "accelerate"
# Imports, memory pools and the first progress bar are over after so long.
UNTIMED_S = 0.5
ENDLESS = 10**6  # epochs
WINDOWS = 4  # of others' samples, in one sample
QUANTITY = "time per step"

Watch = Callable[[nn.Module], nn.Module]
"""Has each training step of a model counted."""


def main(run: Run) -> None:
    """Runs side by side, each of which gives one sample of the time per step."""
    case = " ".join(run.overrides) or "default configuration"
    subjects = [Subject(name) for name in LOOPS]
    if run.is_done("loop_overhead", case, subjects, QUANTITY):
        say(f"loop_overhead {case}: measured already, see {run.path('loop_overhead')}")
        return
    samples: dict[str, list[float]] = {name: [] for name in LOOPS}
    reasons: dict[str, str] = {}
    with progress(run.sizes.repeats, f"loop_overhead {case}") as bar:
        for _ in range(run.sizes.repeats):
            with tempfile.TemporaryDirectory() as folder:
                measured = measure(
                    {
                        name: partial(train_with, name, run.overrides, run.device, folder)
                        for name in LOOPS
                    },
                    # Checkpoints and log points must be part of a sample.
                    *(UNTIMED_S, WINDOWS * run.sizes.window_s, 1, UNAVAILABLE),
                    turn_s=run.turn_s,
                )
            reasons |= measured.reasons
            for name, [steps_per_s] in measured.speeds.items():
                samples[name].append(1000 / steps_per_s)
            bar.update()
    date = now()
    for name, values in samples.items():
        note = f"not measured: {reasons[name]}" if name in reasons else ""
        run.record(
            *("loop_overhead", case, Subject(name), QUANTITY, "ms", values), note=note, date=date
        )


def train_with(
    name: str, overrides: tuple[str, ...], device: torch.device, parent: str, count: Count
) -> None:
    """Train with a loop until `count`, which it calls for each step, ends it."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    cfg = make_config(*overrides, "loader=synthetic", f"output_dir={folder}", "max_steps=null")
    cfg.epochs = ENDLESS
    seed_everything(cfg.seed)
    if name != UNKEPT or device.type != "cpu":
        resolve_device(str(device))  # after which, on a CPU, malloc keeps memory
    sys.stdout, sys.stderr = Terminal(), Terminal()

    def watch(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: count(1) if model.training else None)
        return model

    LOOPS[name](cfg, device, watch, folder)


class Terminal(io.StringIO):
    """A terminal that nobody looks at, so that progress bars are drawn."""

    def isatty(self) -> bool:
        return True


def ours(cfg: Config, device: torch.device, watch: Watch, folder: Path) -> None:
    """`train.py` itself: its model is watched, its validation gives fixed totals."""

    def watched(*arguments: Any) -> nn.Module:
        return watch(build_model(*arguments))

    def no_validation(model: nn.Module, task: Any, *rest: Any, **options: Any) -> Tensor:
        return torch.ones(len(task.metric_names) + 1, dtype=torch.float64)

    with (
        mock.patch.object(train, "build_model", watched),
        mock.patch.object(train, "evaluate", no_validation),
    ):
        train.main(cfg)


def parts(cfg: Config, device: torch.device, watch: Watch) -> tuple[Any, ...]:
    """Loader, task, watched model, optimizer and schedule."""
    loader = train_loader(cfg, device)
    model = build_model(cfg.model, loader.in_channels, loader.num_classes).to(device)
    optimizer, scheduler = build_optimizer(cfg, model, len(loader))
    return loader, build_task(cfg), watch(model), optimizer, scheduler


def bare(cfg: Config, device: torch.device, watch: Watch, folder: Path, clip: bool = False) -> None:
    """Forward, backward and step, and with `clip` the norm of the gradients, and nothing else."""
    loader, task, model, optimizer, _ = parts(cfg, device, watch)
    model.train()
    for inputs, targets in endless(loader):
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        optimizer.step()


def lightning(cfg: Config, device: torch.device, watch: Watch, folder: Path) -> None:
    """Lightning's Trainer with its TensorBoard logger, checkpoint per epoch and progress bar."""
    package = optional("lightning", "lightning")
    loggers = optional("lightning.pytorch.loggers", "lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loader, task, model, optimizer, scheduler = parts(cfg, device, watch)

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
        devices=1,
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

    loader, task, model, optimizer, scheduler = parts(cfg, device, watch)
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
    CLIPPED: partial(bare, clip=True),
    UNKEPT: bare,
    OURS: ours,
    LIGHTNING: lightning,
    ACCELERATE: accelerate,
}
