"""What a run logs: numbers and images for its loggers, lines for the terminal, and JSON files."""

import json
import logging
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from conf.credentials import masked
from conf.files import write_atomically
from conf.schema import Config
from loaders import Loader
from loaders.common import part
from runtime.evaluate import Shown
from runtime.facts import facts_of
from runtime.group import SingleProcess
from runtime.loggers import Loggers
from runtime.preemption import REQUEUE_MARKER
from runtime.progress import Progress, is_finished
from runtime.run_dir import SUMMARY
from runtime.speed import Speed
from runtime.state import settings
from runtime.timing import Timing, bottleneck, verdict
from tasks import Task
from tasks.common import with_targets

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
"""Without a terminal, lines of progress that come faster get twice as many steps between them."""

EPOCH_SUMS = ("losses_in_sum", "epoch_loss_sum", "epoch_steps")
"""Attributes of a recorder that a checkpoint in mid-epoch holds, besides `loss_sum`."""

VERSIONS = {"python": platform.python_version(), "torch": str(torch.__version__)}


class Recorder:
    """Collects the values of a run on the device, and logs them every `log.every_steps` steps.

    Every rank calls its methods; rank 0 alone writes.

    Attributes:
        about: what checkpoints hold besides the state: facts, configuration, versions.
        lr: learning rate of the current step.
    """

    def __init__(
        self,
        cfg: Config,
        loader: Loader,
        run_dir: Path,
        group: SingleProcess,
        timing: Timing,
        precision: torch.dtype,
    ) -> None:
        self.cfg, self.loader, self.run_dir = cfg, loader, run_dir
        self.group, self.timing, self.device = group, timing, timing.device
        self.loggers, self.changed = Loggers(cfg.log.to, run_dir), changed_settings(cfg)
        self.speed = Speed(cfg, loader, group, timing, timing.device)
        self.bar = tqdm(disable=True)
        self.last_line, self.steps_between_lines = -SECONDS_BETWEEN_LINES, cfg.log.every_steps
        self.setting: dict[str, float | str | bool] = {
            "script": Path(sys.argv[0]).name,
            "world_size": group.world_size,
            "precision": (precision_name := str(precision).removeprefix("torch.")),
        }
        facts = facts_of(loader) | {"precision": precision_name}
        self.about: dict[str, Any] = {"facts": facts, "config": settings(cfg), "versions": VERSIONS}
        self.lr = 0.0
        self.num_bad_samples: dict[str, int] = {}
        self.loss_sum, self.grad_norm = torch.zeros((), device=timing.device), torch.zeros(())
        # Steps since the last log point; those of the epoch up to it, and the sum of their losses
        self.losses_in_sum = self.epoch_steps = self.epoch_loss_sum = 0.0

    def open_run(self, model: nn.Module) -> None:
        """Write `config.yaml` and `run.json`, and log the opening lines about the model."""
        cfg, loader, num_ranks = self.cfg, self.loader, self.group.world_size
        self.speed.open_run(model)
        if self.group.rank == 0:
            OmegaConf.save(self.about["config"], self.run_dir / "config.yaml")
            about: dict[str, Any] = {"settings": self.changed, "script": self.setting["script"]}
            about |= self.about["facts"] | {"val_samples": loader.info.num_val_samples}
            write_json(self.run_dir / "run.json", about | {"versions": VERSIONS})
        name = f"{cfg.model.name} {cfg.model.arch}" if cfg.model.arch else cfg.model.name
        arguments = ", ".join(f"{key}={value}" for key, value in cfg.model.kwargs.items())
        size = sum(parameter.numel() for parameter in model.parameters())
        for line in [
            *loader.info.description,
            f"{name}{f'({arguments})' if arguments else ''} with {size:,} parameters; "
            f"{self.setting['precision']} on {self.device}",
            f"{counted(cfg.epochs, 'epoch')} of {counted(len(loader), 'step')} of "
            f"{counted(cfg.global_batch_size, 'sample')} on {counted(num_ranks, 'rank')}, "
            f"{counted(loader.info.num_dropped, 'sample')} dropped per epoch",
        ]:
            log.info(line)

    def open_epoch(self, step_number: int) -> None:
        """Open the loggers and the progress bar."""
        if self.loader.batches_done == 0:  # else the sums of a checkpoint go on
            self.load_state_dict({})
        if self.group.rank != 0:
            return
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        self.loggers.open(self.setting | self.changed, step_number)
        self.bar = tqdm(
            desc=f"epoch {self.loader.epoch + 1}/{self.cfg.epochs}",
            initial=self.loader.batches_done,
            total=len(self.loader),
            unit="step",
            leave=False,
            mininterval=0.5,
            disable=not (self.cfg.log.progress and sys.stderr.isatty()),
        )

    def state_dict(self) -> dict[str, float]:
        """Return the sums of the losses so far, equal on all ranks; every rank calls it."""
        # A copy, because the mean is computed in place.
        loss_sum = self.group.mean(self.loss_sum.clone()).item() if self.losses_in_sum else 0.0
        return {"loss_sum": loss_sum} | {name: getattr(self, name) for name in EPOCH_SUMS}

    def load_state_dict(self, state: dict[str, float]) -> None:
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
        if self.cfg.data.on_error == "skip":
            self.count_bad_samples()
        loss = self.group.mean(self.loss_sum / self.losses_in_sum).item()
        self.timing.finished()
        self.speed.exchange()
        self.epoch_loss_sum += loss * self.losses_in_sum
        self.epoch_steps += self.losses_in_sum
        self.loss_sum.zero_()
        self.losses_in_sum = 0.0
        if self.group.rank != 0:
            return
        norm = self.grad_norm.item()
        points = {"train/loss": loss, "train/lr": self.lr, "train/grad_norm": norm}
        line = f"loss {loss:.4f}"
        points |= self.speed.values(self.speed.ranks and self.speed.ranks.current)
        if self.timing.num_images:
            line += f", {self.timing.speed()}, {bottleneck(points)}"
        self.loggers.log(points, step_number)
        self.bar.set_postfix_str(line, refresh=False)
        if self.bar.disable and step_number % self.steps_between_lines == 0:
            if time.monotonic() - self.last_line < SECONDS_BETWEEN_LINES:
                self.steps_between_lines *= 2
            self.last_line = time.monotonic()
            log.info("step %d: %s", step_number, line)

    def count_bad_samples(self) -> None:
        """Exchange the bad samples that ranks found; `data.max_bad_samples` limits all together."""
        self.num_bad_samples = self.loader.share_bad_samples(self.group.gather)

    def log_inputs(self, batch: tuple[Any, Any], step_number: int) -> None:
        """Log some inputs of the training as images, with their targets."""
        if self.group.rank != 0 or not self.cfg.log.images:
            return
        some = part(batch, 0, self.cfg.log.images)
        images = self.loader.info.pictures(some[0])
        if images is None:
            return
        target = self.loader.info.target
        drawn = with_targets(images, some[1], target, self.cfg.data.value_range)
        self.loggers.log({f"train/{name}": image for name, image in drawn.items()}, step_number)
        # TensorBoard computes checksums in a thread that would hold up the following steps.
        self.loggers.flush()

    def close_epoch(self, step_number: int) -> None:
        """Log the steps since the last log point, and remove the progress bar."""
        if self.losses_in_sum:
            self.log_point(step_number)
        self.speed.gpu.stop()
        self.bar.close()

    def log_pictures(self, task: Task, totals: Tensor, shown: Shown, step_number: int) -> None:
        """Log charts of the totals of a validation, and some samples with their predictions."""
        if self.group.rank != 0 or not self.cfg.log.images or not shown:
            return
        drawn: dict[str, list[Tensor]] = {}
        for inputs, outputs, targets in shown[: self.cfg.log.images]:
            pictures = self.loader.info.pictures(inputs)
            if pictures is not None:
                for name, image in task.visualize(pictures, outputs, targets).items():
                    drawn.setdefault(name, []).append(image)
        # Samples of your own may differ in size.
        images = {
            name: torch.cat([one for one in some if one.shape == some[0].shape])
            for name, some in drawn.items()
        }
        images |= task.plots(totals)
        self.loggers.log({f"val/{name}": image for name, image in images.items()}, step_number)

    def log_validation(self, metrics: dict[str, float], step_number: int) -> None:
        """Log the metrics of a validation."""
        self.loggers.log(metrics, step_number)
        loss = {"train/loss": self.epoch_loss_sum / self.epoch_steps} if self.epoch_steps else {}
        place = f"epoch {self.loader.epoch + 1} of {self.cfg.epochs}"
        if not is_finished(self.loader):
            place += f", step {self.loader.batches_done} of {len(self.loader)}"
        log.info("%s: %s", place, listed(loss | metrics))

    def close_run(self, progress: Progress, step_number: int, num_bad_steps: int) -> None:
        """Write `summary.json`, unless no step was made, and log the closing lines."""
        if self.group.rank != 0:
            return
        (self.run_dir / REQUEUE_MARKER).unlink(missing_ok=True)
        speeds = {"perf/images_per_s": 0.0, "perf/data_wait_share": 0.0}
        slow = self.speed.ranks and self.speed.ranks.whole
        speeds |= self.speed.values(slow)
        seconds = self.timing.seconds
        if not (self.run_dir / SUMMARY).exists():  # else there was nothing left to do
            summary = {
                **progress.metrics,
                "best": progress.best_metrics,
                "best_metric": progress.best_metric,
                "best_mode": progress.best_mode,
                "steps": step_number,
                "bad_steps": num_bad_steps,
                **speeds,
                **({"slowest_rank": slow._asdict()} if slow else {}),
                "seconds": {phase: round(s, 3) for phase, s in seconds.items()},
                "bad_samples": self.num_bad_samples,
                "device": str(self.device),
                "versions": VERSIONS,
                **self.setting,
            }
            write_json(self.run_dir / SUMMARY, summary)
        self.loggers.close()
        log.info("time by phase:")
        for phase, s in seconds.items():
            log.info("  %-12s %8.1f s  %4.0f %%", phase, s, 100 * s / sum(seconds.values()))
        if self.timing.num_images:
            advice = verdict(speeds, self.cfg, self.device)
            log.info("%s in training, %s", self.timing.speed(), advice)
        if slow:
            log.info("%s", slow)
        log.info("best: %s", listed(progress.best_metrics) or "no epoch was validated")
        log.info("logs and checkpoints: %s", self.run_dir)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, which replaces an earlier one atomically."""
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n")


def changed_settings(cfg: Config) -> dict[str, float | str | bool]:
    """Return the values set on the command line, by key, except the run's folder and name."""
    if not HydraConfig.initialized():
        return {}
    typed, hydra = OmegaConf.structured(cfg), HydraConfig.get()
    changed = {}
    for override in hydra.overrides.task:
        key = override.split("=")[0].lstrip("+~")
        value: Any = OmegaConf.select(typed, key)
        if OmegaConf.is_dict(value) or value is None:  # a group, such as data=mnist_mini
            value = hydra.runtime.choices.get(key, value)
        if key not in ("output_dir", "name", "resume"):
            changed[key] = value if isinstance(value, int | float | bool) else str(value)
    return masked(changed)


def counted(number: int, name: str) -> str:
    """Return a number of things as text, such as `2 steps`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in values.items())
