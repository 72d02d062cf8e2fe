"""What a training loop costs beside forward, backward and step: ours, and those of two frameworks.

All train the same model on the same synthetic batches, clip the norm of its gradients as the
configuration says, and keep a log, a progress bar and checkpoints; validation is left out everywhere.
What is timed is the same for all: from one training forward pass of the model to the last one. On a
CPU the loops take turns of a fraction of a second, because the differences are smaller than the
noise of longer times.
"""

import io
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from benchmarks.turns import take_turns
from conf.schema import Config
from models import build_model
from runtime.optimizer import build_optimizer
from runtime.setup import resolve_device, seed_everything
from runtime.tasks import build_task

OURS, BARE = "train.py", "bare loop"
CLIPPED, UNKEPT = "bare loop with clip_grad_norm_", "bare loop with malloc's own settings"
LIGHTNING, ACCELERATE = "Lightning", "accelerate"
# Imports, memory pools and the first progress bar are over after so many steps.
UNTIMED_STEPS = 10
QUANTITY = "time per step"
TURN_S = 0.2
# What would take each process seconds to import.
PRELOAD = ["benchmarks.loop_overhead", "torch._dynamo", "lightning.pytorch.loggers", "accelerate"]


class Stopwatch:
    """Notes when a model's forward passes in training begin."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self.device, self.num_steps = device, num_steps
        self.count = 0
        self.start = self.end = 0.0

    def watch(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(self._forward)
        return model

    def _forward(self, model: nn.Module, inputs: Any) -> None:
        if not model.training:
            return
        if self.count in (UNTIMED_STEPS, self.num_steps - 1):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.start, self.end = self.end, time.perf_counter()
        self.count += 1


def main(run: Run) -> None:
    """Whole runs side by side, one sample of the time per step from each."""
    case = " ".join(run.overrides) or "default configuration"
    subjects = [Subject(name) for name in LOOPS]
    if run.is_done("loop_overhead", case, subjects, QUANTITY):
        say(f"loop_overhead {case}: measured already, see {run.path('loop_overhead')}")
        return
    trials, reasons = {}, {}
    for name in LOOPS:
        try:
            trials[name] = steps_s([name], run, UNTIMED_STEPS + 10)[name]
        except UNAVAILABLE as error:
            reasons[name] = f"not measured: {error}"
    # Checkpoints and log points must be part of a sample.
    num_steps = UNTIMED_STEPS + 1 + max(10, int(4 * run.sizes.window_s / trials[BARE]))
    samples: dict[str, list[float]] = {name: [] for name in LOOPS}
    with progress(run.sizes.repeats, f"loop_overhead {case}") as bar:
        names = [*trials]
        for _ in range(run.sizes.repeats):
            for name, step_s in steps_s(names, run, num_steps).items():
                samples[name].append(step_s)
            names = names[1:] + names[:1]
            bar.update()
    date = now()
    for name, values in samples.items():
        run.record(
            *("loop_overhead", case, Subject(name), QUANTITY, "ms"),
            [1000 * value for value in values],
            note=reasons.get(name, ""),
            date=date,
        )


def steps_s(names: list[str], run: Run, num_steps: int) -> dict[str, float]:
    """Seconds per step of the named loops, measured side by side."""
    device = run.device
    # A GPU would go on with a stopped process's work.
    turn_s = TURN_S if device.type == "cpu" else None
    calls = {name: partial(once, name, run.overrides, device, num_steps) for name in names}
    outcomes = take_turns(calls, turn_s, PRELOAD)
    return {
        name: outcome.running_s(*outcome.result) / (num_steps - 1 - UNTIMED_STEPS)
        for name, outcome in outcomes.items()
    }


def once(
    name: str, overrides: Sequence[str], device: torch.device, num_steps: int
) -> tuple[float, float]:
    """One run of a loop in a folder of its own, which is removed.

    Returns:
        When the first timed step began and the last one had ended, by `time.perf_counter`.
    """
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(
            *overrides, "loader=synthetic", f"output_dir={folder}", f"max_steps={num_steps}"
        )
        seed_everything(cfg.seed)
        # As many epochs as the steps need, with a checkpoint after each.
        cfg.epochs = max(1, num_steps)
        if name != UNKEPT:
            resolve_device(cfg.device)  # after which, on a CPU, malloc keeps memory
        stopwatch = Stopwatch(device, num_steps)
        sys.stdout, sys.stderr = Terminal(), Terminal()
        LOOPS[name](cfg, device, stopwatch, Path(folder))
    return stopwatch.start, stopwatch.end


class Terminal(io.StringIO):
    """A terminal that nobody looks at, so that progress bars are drawn."""

    def isatty(self) -> bool:
        return True


def ours(cfg: Config, device: torch.device, stopwatch: Stopwatch, folder: Path) -> None:
    """`train.py` itself: its model is watched, its validation gives fixed totals."""

    def watched(*arguments: Any) -> nn.Module:
        return stopwatch.watch(build_model(*arguments))

    def no_validation(model: nn.Module, task: Any, *rest: Any, **options: Any) -> Tensor:
        return torch.ones(len(task.metric_names) + 1, dtype=torch.float64)

    with (
        mock.patch.object(train, "build_model", watched),
        mock.patch.object(train, "evaluate", no_validation),
    ):
        train.main(cfg)


def parts(cfg: Config, device: torch.device, stopwatch: Stopwatch) -> tuple[Any, ...]:
    """Loader, task, watched model, optimizer and schedule."""
    loader = train_loader(cfg, device)
    model = build_model(cfg.model, loader.in_channels, loader.num_classes).to(device)
    optimizer, scheduler = build_optimizer(cfg, model, len(loader))
    return loader, build_task(cfg), stopwatch.watch(model), optimizer, scheduler


def bare(
    cfg: Config, device: torch.device, stopwatch: Stopwatch, folder: Path, clip: bool = False
) -> None:
    """Forward, backward and step, and with `clip` the norm of the gradients, and nothing else."""
    loader, task, model, optimizer, _ = parts(cfg, device, stopwatch)
    model.train()
    batches = endless(loader)
    for _ in range(stopwatch.num_steps):
        inputs, targets = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        optimizer.step()


def lightning(cfg: Config, device: torch.device, stopwatch: Stopwatch, folder: Path) -> None:
    """Lightning's Trainer with its TensorBoard logger, checkpoint per epoch and progress bar."""
    package = optional("lightning", "lightning")
    loggers = optional("lightning.pytorch.loggers", "lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loader, task, model, optimizer, scheduler = parts(cfg, device, stopwatch)

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
        max_steps=stopwatch.num_steps,
        default_root_dir=folder,
        logger=loggers.TensorBoardLogger(folder),
        log_every_n_steps=cfg.log.every_steps,
        gradient_clip_val=cfg.clip_grad_norm,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


def accelerate(cfg: Config, device: torch.device, stopwatch: Stopwatch, folder: Path) -> None:
    """accelerate around a plain loop, with its TensorBoard tracker and checkpoint per epoch."""
    package = optional("accelerate", "accelerate")
    from tqdm import tqdm

    loader, task, model, optimizer, scheduler = parts(cfg, device, stopwatch)
    accelerator = package.Accelerator(
        cpu=device.type == "cpu", log_with="tensorboard", project_dir=str(folder)
    )
    accelerator.init_trackers("run")
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model.train()
    step = 0
    while step < stopwatch.num_steps:
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
            if step == stopwatch.num_steps:
                break
        accelerator.save_state(str(folder / "checkpoint"))
    accelerator.end_training()


Loop = Callable[[Config, torch.device, Stopwatch, Path], None]
LOOPS: dict[str, Loop] = {
    BARE: bare,
    CLIPPED: partial(bare, clip=True),
    UNKEPT: bare,
    OURS: ours,
    LIGHTNING: lightning,
    ACCELERATE: accelerate,
}
