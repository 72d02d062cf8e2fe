"""What a run says about itself: lines, a progress bar, loggers, and JSON files in its folder."""

import json
import logging
import platform
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from conf.errors import counted, told
from conf.files import write_atomically
from conf.names import find
from conf.schema import Config
from loaders import Loader
from loaders.batch import part
from runtime.evaluate import Shown
from runtime.loggers import Logger
from runtime.progress import Progress
from runtime.resume import facts_of
from runtime.run_dir import SUMMARY
from runtime.timing import Timer, bottleneck, speed_text
from tasks import Task

log = logging.getLogger(__name__)


class Report:
    """Collects the values of a run on the device, and logs them every `log.every_steps` steps.

    Every rank calls its methods; rank 0 alone writes and shows anything.
    """

    def __init__(
        self, cfg: Config, loader: Loader, timer: Timer, precision: torch.dtype, num_steps: int
    ) -> None:
        self.cfg, self.loader, self.timer, self.group = cfg, loader, timer, timer.group
        self.run_dir, self.num_steps = Path(cfg.output_dir), num_steps
        self.num_pictures = cfg.log.images if self.group.rank == 0 else 0
        self.process: dict[str, Any] = {
            "script": Path(sys.argv[0]).name,
            "world_size": self.group.world_size,
            "precision": str(precision).removeprefix("torch."),
        }
        self.versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        # What the use of the model needs, which is written with its weights
        self.facts = facts_of(loader) | {"precision": self.process["precision"]}

        self.classes: dict[str, type[Logger]] = {
            name: find("runtime.loggers", name, "log.to", "{}Logger") for name in cfg.log.to
        }
        self.loggers: dict[str, Logger] = {}
        self.settings: dict[str, Any] = {}  # none yet, or on other ranks: nothing is logged
        self.first_step = 0
        self.bar = tqdm(disable=True)

        # Number of the step, loss and samples of batches: as many steps as between two log points
        self.batches: deque[tuple[int, Tensor, Sequence[int]]] = deque()
        self.logged_step = 0
        # Of the steps of the epoch up to the last log point
        self.epoch_loss_sum, self.epoch_steps = 0.0, 0

    def open(self, model: nn.Module) -> None:
        """Write `config.yaml` and `run.json`, and log the first lines; let the loggers begin with
        the next value: a run that fails before it has no log."""
        if self.group.rank != 0:
            return
        cfg, info, settings = self.cfg, self.loader.info, changed_settings()
        self.settings, self.first_step = self.process | settings, self.loader.steps_done
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        with write_atomically(self.run_dir / "config.yaml") as temporary:
            OmegaConf.save(asdict(cfg), temporary)
        about = {"settings": settings, **self.process, "versions": self.versions}
        about |= {"classes": info.classes, "val_samples": info.num_val_samples}
        write_json(self.run_dir / "run.json", about)

        kwargs = {"arch": cfg.model.arch} if cfg.model.arch else {}
        kwargs |= cfg.model.kwargs
        arguments = ", ".join(f"{key}={value}" for key, value in kwargs.items())
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        place = f"{self.process['precision']} on {self.timer.device}"
        steps = f"{counted(len(self.loader), 'step')} of {counted(cfg.global_batch_size, 'sample')}"
        ranks = counted(self.group.world_size, "rank")
        for line in (
            *info.description,
            f"{cfg.model.name}({arguments}) with {num_parameters:,} parameters; {place}",
            f"{counted(cfg.epochs, 'epoch')} of {steps} on {ranks}, "
            f"{counted(info.num_dropped, 'sample')} dropped per epoch",
        ):
            log.info(line)

    @contextmanager
    def closing_loggers(self) -> Iterator[None]:
        """Close the loggers at the end of the block, also where an error or a signal ends it."""
        is_finished = False
        try:
            yield
            is_finished = True
        finally:
            for name, logger in self.loggers.items():
                try:
                    logger.close(is_finished)
                except Exception as error:
                    warn_of(name, error)
            self.loggers = {}

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

    def inputs(self, batch: tuple[Any, Any]) -> None:
        """Log some inputs of the training as images."""
        if self.num_pictures:
            images = self.loader.info.pictures(part(batch[0], 0, self.num_pictures))
            self._log({} if images is None else {"train/inputs": images})

    def add_loss(self, loss: Tensor) -> None:
        """Keep the loss, unread, and the samples of the current step's batch, or of its part."""
        number = self.loader.steps_done
        last_unused = min(number - self.cfg.log.every_steps, self.logged_step)
        while self.batches and self.batches[0][0] <= last_unused:
            self.batches.popleft()
        self.batches.append((number, loss.detach(), self.loader.last_samples))

    def log_point(self, learning_rate: float, grad_norms: list[Tensor]) -> bool:
        """Log the mean loss of so many steps since the last log point and the other values of the
        current one; return True if loss and norm are finite, equal on all ranks."""
        losses = [loss.float() for number, loss, _ in self.batches if number > self.logged_step]
        mean = torch.stack(losses).sum() / len(grad_norms)
        values = torch.stack([mean, grad_norms[-1].to(mean)])
        loss, norm = self.group.mean(values).tolist()
        self.timer.log_point()
        self.epoch_loss_sum += loss * len(grad_norms)
        self.epoch_steps += len(grad_norms)
        self.logged_step = self.loader.steps_done
        speeds = self.timer.values()
        self._log({"train/loss": loss, "train/lr": learning_rate, "train/grad_norm": norm} | speeds)
        if self.group.rank == 0:
            self._show(loss, speeds)
        return bool(values.isfinite().all())

    def validation(
        self, task: Task, metrics: dict[str, float], totals: Tensor, shown: Shown | None
    ) -> None:
        """Log the metrics of a validation, charts of its totals, some samples with predictions, and
        the mean loss of the epoch's steps so far."""
        if self.num_pictures and shown is not None:
            inputs, outputs, targets = part(shown, 0, self.num_pictures)
            pictures = self.loader.info.pictures(inputs)
            images = {} if pictures is None else task.visualize(pictures, outputs, targets)
            images |= task.plots(totals)
            self._log({f"val/{name}": image for name, image in images.items()})
        if self.epoch_steps:
            metrics = {"train/epoch_loss": self.epoch_loss_sum / self.epoch_steps} | metrics
        self._log(metrics)
        place = f"epoch {self.loader.epoch + 1} of {self.cfg.epochs}"
        if not self.loader.is_finished:
            place += f", step {self.loader.batches_done} of {len(self.loader)}"
        log.info("%s: %s", place, metrics_text(metrics))

    def close(self, progress: Progress) -> None:
        """Write `summary.json`, unless that of a finished run is there, and log the last lines."""
        if self.group.rank != 0:
            return
        speeds, seconds, slow = self.timer.values(), self.timer.seconds, self.timer.slow
        summary = {
            **progress.metrics,
            "best": progress.best_metrics,
            "best_metric": progress.best_metric,
            "best_mode": progress.best_mode,
            "best_by_class": progress.best_by_class,
            "steps": self.loader.steps_done,
            **speeds,
            "slowest_rank": slow,
            "seconds": {phase: round(s, 3) for phase, s in seconds.items()},
            "device": str(self.timer.device),
            "versions": self.versions,
            **self.process,
        }
        if not (self.run_dir / SUMMARY).exists():  # else there was nothing left to do
            write_json(self.run_dir / SUMMARY, summary)

        log.info("time by phase:")
        for phase, s in seconds.items():
            log.info("  %-12s %8.1f s  %4.0f %%", phase, s, 100 * s / sum(seconds.values()))
        if "perf/images_per_s" in speeds:
            bound, advice = bottleneck(speeds)
            log.info("%s in training, %s%s", speed_text(speeds), bound, advice)
        if slow:
            rank, by = f"{slow['rank']} on {slow['host']}", f"{slow['slower_by']:.0%}"
            log.info("slowest: rank %s, %s slower than others", rank, by)
        best = metrics_text(progress.best_metrics) or "no epoch was validated"
        log.info("best by %s: %s", progress.best_metric or "any metric", best)
        log.info("logs and checkpoints: %s", self.run_dir)

    def _log(self, values: dict[str, Any]) -> None:
        """Log numbers and images by name at the current step. A logger that raises an error is left
        out from then on: training goes on."""
        if not self.settings:
            return
        for name, new in [*self.classes.items()]:
            try:
                if name not in self.loggers:
                    self.loggers[name] = new(self.run_dir, self.settings, self.first_step)
                self.loggers[name].log(values, self.loader.steps_done)
            except Exception as error:  # a service's own type, or a bug
                warn_of(name, error)
                self.loggers.pop(name, None)
                self.classes.pop(name)

    def _show(self, loss: float, speeds: dict[str, float]) -> None:
        """Show the values of a log point: beside the progress bar, or in a line of their own."""
        step, total = self.loader.steps_done, self.num_steps
        shown = [f"loss {loss:.4f}"]
        if "perf/images_per_s" in speeds:
            shown.append(speed_text(speeds))
            if self.bar.disable:
                shown += [f"{self.timer.time_of(total - step)} left", bottleneck(speeds)[0]]
        if self.bar.disable:
            log.info("step %d of %d: %s", step, total, ", ".join(shown))
        else:
            self.bar.set_postfix_str(", ".join(shown), refresh=False)


def warn_of(name: str, error: Exception) -> None:
    log.warning("log.to=%s: values are lost from here on: %s", name, told(error))


def metrics_text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def write_json(path: Path, values: dict[str, Any]) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n")


def changed_settings() -> dict[str, float | str | bool]:
    """Return the values set on the command line, by key, except the run's folder and name."""
    if not HydraConfig.initialized():
        return {}
    changed = {}
    overrides = OverridesParser.create().parse_overrides(HydraConfig.get().overrides.task)
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key not in ("output_dir", "name", "resume"):
            changed[key] = value if isinstance(value, int | float | bool) else str(value)
    return changed
