"""The numbers and images that a run logs in its steps and validations, and its progress."""

import logging
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
from runtime.progress import is_finished, metrics_text, num_steps, steps_done
from runtime.timing import Timer, bottleneck, speed_text
from tasks import Task

log = logging.getLogger(__name__)


class MetricLogger:
    """Collects the values of a run on the device, and logs them every `log.every_steps` steps.

    Every rank calls its methods; rank 0 alone opens loggers and shows progress.
    """

    def __init__(
        self,
        cfg: Config,
        loader: Loader,
        run_dir: Path,
        group: ProcessGroup,
        timer: Timer,
    ) -> None:
        self.cfg, self.loader, self.group, self.timer = cfg, loader, group, timer
        self.loggers = Loggers(cfg.log.to, run_dir)
        self.num_pictures = cfg.log.images if group.rank == 0 else 0
        self.bar = tqdm(disable=True)
        # Of the steps since the last log point, and of those of the epoch up to it
        self.loss_sum, self.num_steps = torch.zeros((), device=timer.device), 0
        self.epoch_loss_sum, self.epoch_steps = 0.0, 0

    def open(self, settings: Settings) -> None:
        """Open the loggers with `settings` that distinguish the run."""
        if self.group.rank == 0:
            self.loggers.open(settings, steps_done(self.loader))

    def open_epoch(self) -> None:
        """Open the progress bar, on a terminal."""
        self.epoch_loss_sum, self.epoch_steps = 0.0, 0
        is_shown = self.group.rank == 0 and self.cfg.log.progress and sys.stderr.isatty()
        self.bar = tqdm(
            desc=f"epoch {self.loader.epoch + 1}/{self.cfg.epochs}",
            initial=self.loader.batches_done,
            total=len(self.loader),
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            dynamic_ncols=True,
            leave=False,
            mininterval=0.5,
            disable=not is_shown,
        )

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a batch, or of a micro-batch divided by their number."""
        self.loss_sum += loss.detach()

    def end_step(self) -> None:
        """Count an optimizer step, whose losses were added."""
        self.num_steps += 1
        self.bar.update()

    def log_point(self, learning_rate: float, grad_norm: Tensor) -> bool:
        """Log the mean loss since the last log point and the other values of the current step;
        return True if loss and gradient norm are finite, equal on all ranks."""
        values = torch.stack([self.loss_sum / self.num_steps, grad_norm.to(self.loss_sum)])
        loss, norm = self.group.mean(values).tolist()
        self.timer.log_point()
        self.epoch_loss_sum += loss * self.num_steps
        self.epoch_steps += self.num_steps
        self.loss_sum.zero_()
        self.num_steps = 0
        points = {"train/loss": loss, "train/lr": learning_rate, "train/grad_norm": norm}
        self.log(points | self.timer.values())
        if self.group.rank == 0:
            self._show(loss)
        return bool(values.isfinite().all())

    def log(self, values: dict[str, Any]) -> None:
        """Log numbers and images by name at the current step."""
        self.loggers.log(values, steps_done(self.loader))

    def _show(self, loss: float) -> None:
        """Show the values of a log point: beside the progress bar, or in a line of their own."""
        speeds, shown = self.timer.values(), [f"loss {loss:.4f}"]
        step, total = steps_done(self.loader), num_steps(self.cfg, self.loader)
        if "perf/images_per_s" in speeds:
            shown.append(speed_text(speeds))
        if not self.bar.disable:
            self.bar.set_postfix_str(", ".join(shown), refresh=False)
            return
        if "perf/images_per_s" in speeds:
            shown += [f"{self.timer.time_of(total - step)} left", bottleneck(speeds)[0]]
        log.info("step %d of %d: %s", step, total, ", ".join(shown))

    def log_inputs(self, batch: tuple[Any, Any]) -> None:
        """Log some inputs of the training as images."""
        if not self.num_pictures:
            return
        images = self.loader.info.pictures(part(batch[0], 0, self.num_pictures))
        if images is not None:
            self.log({"train/inputs": images})

    def log_pictures(self, task: Task, totals: Tensor, shown: Shown | None) -> None:
        """Log charts of the totals of a validation, and some samples with their predictions."""
        if not self.num_pictures or shown is None:
            return
        inputs, outputs, targets = part(shown, 0, self.num_pictures)
        pictures = self.loader.info.pictures(inputs)
        images = {} if pictures is None else task.visualize(pictures, outputs, targets)
        images |= task.plots(totals)
        self.log({f"val/{name}": image for name, image in images.items()})

    def log_validation(self, metrics: dict[str, float]) -> None:
        """Log the metrics of a validation, and the mean loss of the epoch's steps so far."""
        values = metrics
        if self.epoch_steps:
            values = {"train/epoch_loss": self.epoch_loss_sum / self.epoch_steps} | metrics
        self.log(values)
        place = f"epoch {self.loader.epoch + 1} of {self.cfg.epochs}"
        if not is_finished(self.loader):
            place += f", step {self.loader.batches_done} of {len(self.loader)}"
        log.info("%s: %s", place, metrics_text(values))
