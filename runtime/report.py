"""What a run says about itself: lines, a progress bar, loggers, and JSON files in its folder."""

import json
import logging
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from conf.errors import counted
from conf.files import write_atomically
from conf.schema import Config
from loaders import Loader
from loaders.batch import part
from runtime.evaluate import Shown
from runtime.loggers import Loggers
from runtime.progress import Progress, is_finished, num_steps, steps_done
from runtime.resume import facts_of
from runtime.run_dir import SUMMARY
from runtime.timing import Timer, bottleneck, speed_text
from tasks import Task

log = logging.getLogger(__name__)


class Report:
    """Collects the values of a run on the device, and logs them every `log.every_steps` steps.

    Every rank calls its methods; rank 0 alone writes and shows anything.
    """

    def __init__(self, cfg: Config, loader: Loader, timer: Timer, precision: torch.dtype) -> None:
        self.cfg, self.loader, self.timer, self.group = cfg, loader, timer, timer.group
        self.run_dir = Path(cfg.output_dir)
        self.loggers = Loggers(cfg.log.to, self.run_dir)
        self.num_pictures = cfg.log.images if self.group.rank == 0 else 0
        self.process: dict[str, Any] = {
            "script": Path(sys.argv[0]).name,
            "world_size": self.group.world_size,
            "precision": str(precision).removeprefix("torch."),
        }
        self.versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        self.bar = tqdm(disable=True)
        # Of the steps since the last log point, and of those of the epoch up to it
        self.loss_sum, self.num_steps = torch.zeros((), device=timer.device), 0
        self.epoch_loss_sum, self.epoch_steps = 0.0, 0

    def facts(self) -> dict[str, Any]:
        """Return what the use of the model needs, which is written with its weights."""
        return facts_of(self.loader) | {"precision": self.process["precision"]}

    def open(self, model: nn.Module) -> None:
        """Let the loggers begin, write `config.yaml` and `run.json`, and log the first lines."""
        if self.group.rank != 0:
            return
        cfg, info, settings = self.cfg, self.loader.info, changed_settings()
        self.loggers.open(self.process | settings, steps_done(self.loader))
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        with write_atomically(self.run_dir / "config.yaml") as temporary:
            OmegaConf.save(asdict(cfg), temporary)
        about = {"settings": settings, **self.process, **self.facts(), "classes": info.classes}
        about |= {"val_samples": info.num_val_samples, "versions": self.versions}
        write_json(self.run_dir / "run.json", about)
        for line in info.description:
            log.info(line)
        kwargs = {"arch": cfg.model.arch} if cfg.model.arch else {}
        log.info(
            "%s(%s) with %s parameters; %s on %s",
            cfg.model.name,
            ", ".join(f"{key}={value}" for key, value in (kwargs | dict(cfg.model.kwargs)).items()),
            f"{sum(parameter.numel() for parameter in model.parameters()):,}",
            self.process["precision"],
            self.timer.device,
        )
        log.info(
            "%s of %s of %s on %s, %s dropped per epoch",
            counted(cfg.epochs, "epoch"),
            counted(len(self.loader), "step"),
            counted(cfg.global_batch_size, "sample"),
            counted(self.group.world_size, "rank"),
            counted(info.num_dropped, "sample"),
        )

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

    def end_step(self) -> None:
        """Count an optimizer step, whose losses were added to `loss_sum`."""
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
        if not is_finished(self.loader):
            place += f", step {self.loader.batches_done} of {len(self.loader)}"
        log.info("%s: %s", place, metrics_text(metrics))

    def close(self, progress: Progress) -> None:
        """Write `summary.json`, unless that of a finished run is there, and log the last lines."""
        self.loggers.close()
        if self.group.rank != 0:
            return
        speeds, seconds, slow = self.timer.values(), self.timer.seconds, self.timer.slow
        summary = {
            **progress.metrics,
            "best": progress.best_metrics,
            "best_metric": progress.best_metric,
            "best_mode": progress.best_mode,
            "best_by_class": progress.best_by_class,
            "steps": steps_done(self.loader),
            **{"perf/images_per_s": 0.0, "perf/data_wait_share": 0.0},
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
        """Log numbers and images by name at the current step."""
        self.loggers.log(values, steps_done(self.loader))

    def _show(self, loss: float, speeds: dict[str, float]) -> None:
        """Show the values of a log point: beside the progress bar, or in a line of their own."""
        step, total = steps_done(self.loader), num_steps(self.cfg, self.loader)
        shown = [f"loss {loss:.4f}"]
        if "perf/images_per_s" in speeds:
            shown.append(speed_text(speeds))
            if self.bar.disable:
                shown += [f"{self.timer.time_of(total - step)} left", bottleneck(speeds)[0]]
        if self.bar.disable:
            log.info("step %d of %d: %s", step, total, ", ".join(shown))
        else:
            self.bar.set_postfix_str(", ".join(shown), refresh=False)


def metrics_text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def write_json(path: Path, values: dict[str, Any]) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n")


def changed_settings() -> dict[str, float | str | bool]:
    """Return the values set on the command line, by key, except the run's folder and name."""
    if not HydraConfig.initialized():
        return {}
    parser = OverridesParser.create()
    changed = {}
    for override in parser.parse_overrides(HydraConfig.get().overrides.task):
        key, value = override.key_or_group, override.value()
        if key not in ("output_dir", "name", "resume"):
            changed[key] = value if isinstance(value, int | float | bool) else str(value)
    return changed
