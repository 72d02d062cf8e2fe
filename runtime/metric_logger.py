"""The numbers and images that a run logs in its steps and validations, and its progress."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from conf.schema import Config
from loaders import Loader
from loaders.batch import part
from runtime.evaluate import Shown
from runtime.loggers import Loggers, Settings
from runtime.process_group import ProcessGroup
from runtime.progress import is_finished, metrics_text, num_steps
from runtime.speed import Speed, bottleneck
from runtime.timing import Timing
from tasks import Task

log = logging.getLogger(__name__)

BAR_COLUMNS = 50
"""Columns of a terminal for a progress bar and its counts, beside what the bar says."""

EPOCH_SUMS = ("losses_in_sum", "epoch_loss_sum", "epoch_steps")
"""Attributes of a recorder that a checkpoint in mid-epoch holds, besides `loss_sum`."""


class MetricLogger:
    """Collects the values of a run on the device, and logs them every `log.every_steps` steps.

    Every rank calls its methods; rank 0 alone opens loggers and shows progress.

    Attributes:
        lr: learning rate of the current step.
        is_finite: whether loss and gradient norm of the last log point are numbers; equal on all
            ranks.
        speed: what is measured.
    """

    def __init__(
        self,
        cfg: Config,
        loader: Loader,
        run_dir: Path,
        group: ProcessGroup,
        timing: Timing,
    ) -> None:
        self.cfg, self.loader, self.group, self.timing = cfg, loader, group, timing
        self.loggers, self.speed = Loggers(cfg.log.to, run_dir), Speed(group, timing)
        self.num_pictures = cfg.log.images if group.rank == 0 else 0
        self.bar = tqdm(disable=True)
        self.lr, self.is_finite = 0.0, True
        self.loss_sum, self.grad_norm = torch.zeros((), device=timing.device), torch.zeros(())
        # Steps since the last log point; those of the epoch up to it, and the sum of their losses
        self.losses_in_sum = self.epoch_steps = self.epoch_loss_sum = 0.0

    def open_epoch(self, settings: Settings, step_number: int) -> None:
        """Open the progress bar, and the loggers with `settings` that distinguish the run."""
        if self.loader.batches_done == 0:  # else the sums of a checkpoint go on
            self.load_sums({})
        if self.group.rank != 0:
            return
        self.loggers.open(settings, step_number)
        self.bar = tqdm(
            desc=f"epoch {self.loader.epoch + 1}/{self.cfg.epochs}",
            initial=self.loader.batches_done,
            total=len(self.loader),
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            dynamic_ncols=True,
            leave=False,
            mininterval=0.5,
            disable=not (self.cfg.log.progress and sys.stderr.isatty()),
        )

    def gather_sums(self) -> dict[str, float]:
        """Return the sums of the losses so far, means over the ranks; every rank calls it."""
        # A copy, because the mean is computed in place.
        loss_sum = self.group.mean(self.loss_sum.clone()).item() if self.losses_in_sum else 0.0
        return {"loss_sum": loss_sum} | {name: getattr(self, name) for name in EPOCH_SUMS}

    def load_sums(self, state: dict[str, float]) -> None:
        """Continue with such sums, {}: with none."""
        self.loss_sum.fill_(state.get("loss_sum", 0.0))
        for name in EPOCH_SUMS:
            setattr(self, name, state.get(name, 0.0))

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a batch, or of a micro-batch divided by their number."""
        self.loss_sum += loss.detach()

    def end_step(self, step_number: int, grad_norm: Tensor) -> None:
        """Count an optimizer step, whose losses were added."""
        self.losses_in_sum += 1
        self.grad_norm = grad_norm
        if step_number % self.cfg.log.every_steps == 0:
            self.log_point(step_number)
        if self.group.rank == 0:
            self.speed.gpu.start()
        self.bar.update()

    def log_point(self, step_number: int) -> None:
        """Log the mean loss since the last log point and the other values of the current step."""
        loss = self.group.mean(self.loss_sum / self.losses_in_sum).item()
        self.timing.finished()
        self.speed.exchange()
        self.epoch_loss_sum += loss * self.losses_in_sum
        self.epoch_steps += self.losses_in_sum
        self.loss_sum.zero_()
        self.losses_in_sum = 0.0
        points = {"train/loss": loss, "train/lr": self.lr, "train/grad_norm": self.grad_norm.item()}
        self.is_finite = math.isfinite(loss) and math.isfinite(points["train/grad_norm"])
        points |= self.speed.values()
        self.loggers.log(points, step_number)
        if self.group.rank == 0:
            self.show(step_number, loss, points)

    def show(self, step_number: int, loss: float, points: dict[str, float]) -> None:
        """Show the values of a log point: beside the progress bar, or in a line of their own."""
        values, timing = [f"loss {loss:.4f}"], self.timing
        if not self.bar.disable:
            if timing.num_images:
                values += [timing.speed(), bottleneck(points).partition(":")[0]]
            room = (self.bar.format_dict["ncols"] or 80) - BAR_COLUMNS
            while len(values) > 1 and len(", ".join(values)) > room:
                values.pop()
            self.bar.set_postfix_str(", ".join(values), refresh=False)
        else:
            total = num_steps(self.cfg, self.loader)
            if timing.num_images:
                left = timing.time_of(total - step_number)
                values += [timing.speed(), f"{left} left", bottleneck(points)]
            log.info("step %d of %d: %s", step_number, total, ", ".join(values))

    def log_inputs(self, batch: tuple[Any, Any], step_number: int) -> None:
        """Log some inputs of the training as images."""
        if not self.num_pictures:
            return
        images = self.loader.info.pictures(part(batch[0], 0, self.num_pictures))
        if images is not None:
            self.loggers.log({"train/inputs": images}, step_number)

    def close_epoch(self, step_number: int) -> None:
        """Log the steps since the last log point, and remove the progress bar."""
        if self.losses_in_sum:
            self.log_point(step_number)
        self.speed.gpu.stop()
        self.bar.close()

    def log_pictures(
        self, task: Task, totals: Tensor, shown: Shown | None, step_number: int
    ) -> None:
        """Log charts of the totals of a validation, and some samples with their predictions."""
        if not self.num_pictures or shown is None:
            return
        inputs, outputs, targets = part(shown, 0, self.num_pictures)
        pictures = self.loader.info.pictures(inputs)
        images = {} if pictures is None else task.visualize(pictures, outputs, targets)
        images |= task.plots(totals)
        self.loggers.log({f"val/{name}": image for name, image in images.items()}, step_number)

    def log_validation(self, metrics: dict[str, float], step_number: int) -> None:
        """Log the metrics of a validation, and the mean loss of the epoch's steps so far."""
        values = metrics
        if self.epoch_steps:
            values = {"train/epoch_loss": self.epoch_loss_sum / self.epoch_steps} | metrics
        self.loggers.log(values, step_number)
        place = f"epoch {self.loader.epoch + 1} of {self.cfg.epochs}"
        if not is_finished(self.loader):
            place += f", step {self.loader.batches_done} of {len(self.loader)}"
        log.info("%s: %s", place, metrics_text(values))
