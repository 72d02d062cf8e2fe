"""The run's record: progress, TensorBoard, log file and the closing summary."""

import json
import logging
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from loaders import Loader
from runtime.tasks import Task

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

SECONDS_BETWEEN_PLAIN_LINES = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.5
WORTH_MENTIONING = 0.1
"""Share of the time waiting for data above which a run is called input-bound."""


def run_folder(cfg: "Config") -> Path:
    """The one folder of this run; in a multirun each job has its own."""
    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.output_dir)
    return Path(cfg.output_dir)


class RunLogger:
    """Writes what happens in a run; on ranks other than 0 it only measures.

    Values stay on the device until a log point (every `log.every_steps` steps).

    Attributes:
        step_number: optimizer steps since the start of the run, also over resumes.
        seconds: time spent so far by part of the run.
    """

    def __init__(
        self, cfg: "Config", device: torch.device, rank: int = 0, world_size: int = 1
    ) -> None:
        self.cfg, self.device, self.rank, self.world_size = cfg, device, rank, world_size
        # Looked up in each step, where a lookup in the configuration would take time.
        self.max_steps, self.every_steps = cfg.max_steps, cfg.log.every_steps
        self.folder = run_folder(cfg)
        self.step_number = 0
        self.metrics: dict[str, float] = {}
        self.best_metrics: dict[str, float] = {}
        self.best = float("-inf")
        self.num_images = 0
        self.writer: SummaryWriter | None = None
        self.bar: Any = None
        self.last_plain_line = 0.0
        self.loss_sum = torch.zeros((), device=device)
        self.steps_in_sum = 0
        self.seconds = {"start_up": time.time() - psutil.Process().create_time()}
        self.mark = time.perf_counter()
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(cfg, self.folder / "config.yaml", resolve=True)
        _log_to(self.folder / "train.log", rank)

    def state_dict(self) -> dict[str, Any]:
        """What the closing summary says of the epochs so far."""
        return {"best": self.best, "best_metrics": self.best_metrics, "metrics": self.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_metrics = state["best"], state["best_metrics"]
        self.metrics = state["metrics"]

    @property
    def reached_max_steps(self) -> bool:
        return self.max_steps is not None and self.step_number >= self.max_steps

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part` of the run."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.mark
        self.mark = now

    def track(self, loader: Loader, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's batches until `max_steps`; the time waiting for each and using it is counted."""
        self.step_number = epoch * len(loader) + loader.batches_done
        self._open(loader, epoch)
        self.lap("other")
        batches = iter(loader)
        while not self.reached_max_steps:
            batch = next(batches, None)
            self.lap("data_wait")
            if batch is None:
                break
            if self.step_number == 0 and self.writer is not None and self.cfg.log.images:
                images = loader.denormalize(batch[0][: self.cfg.log.images])
                with self._without_tensorboard_if_it_fails():
                    self.writer.add_images("train/inputs", images, 0)
            yield batch
            self.lap("compute")
            if "first_step" in self.seconds:
                self.num_images += len(batch[0]) * self.world_size
            else:
                # It also fills queues, compiles and connects the ranks: later steps are faster.
                waiting, computing = self.seconds.pop("data_wait"), self.seconds.pop("compute")
                self.seconds["first_step"] = waiting + computing
        if self.bar is not None:
            self.bar.close()

    def step(self, loss: Tensor, grad_norm: Tensor, scheduler: LRScheduler) -> None:
        """Record one optimizer step.

        Args:
            loss: mean over this rank's batch.
            grad_norm: L2 norm of all gradients, before clipping.
            scheduler: tells the learning rate of the step; it steps after this.
        """
        self.loss_sum += loss.detach()
        self.steps_in_sum += 1
        self.step_number += 1
        if self.step_number % self.every_steps == 0:
            self._log_point(grad_norm, float(scheduler.get_last_lr()[0]))
        if self.bar is not None:
            self.bar.update()

    def _log_point(self, grad_norm: Tensor, lr: float) -> None:
        mean_loss = self.loss_sum / self.steps_in_sum
        if dist.is_initialized():
            dist.all_reduce(mean_loss)
            mean_loss /= self.world_size
        self.loss_sum.zero_()
        self.steps_in_sum = 0
        if self.rank != 0:
            return
        loss = mean_loss.item()
        values = {"train/loss": loss, "train/grad_norm": grad_norm.item(), "train/lr": lr}
        line = f"loss {loss:.4f}"
        if self.num_images:
            values["perf/images_per_s"] = self.images_per_s
            values["perf/data_wait_share"] = self.data_wait_share
            line += f", {self._speed()} images/s, {self.data_wait_share:.0%} waiting for data"
        self._scalars(values)
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
        elif time.perf_counter() - self.last_plain_line > SECONDS_BETWEEN_PLAIN_LINES:
            self.last_plain_line = time.perf_counter()
            log.info("step %d: %s", self.step_number, line)

    def epoch(self, epoch: int, task: Task, totals: Tensor) -> dict[str, float]:
        """Record the validation after an epoch.

        Args:
            epoch: counts from 0.
            task: turns the totals into metrics.
            totals: `evaluate()`'s sums over the whole validation split.

        Returns:
            The metrics by their short name.
        """
        self.lap("validation")
        metrics = task.metrics(totals)
        self.metrics = {f"val/{name}": value for name, value in metrics.items()}
        if metrics[task.best_metric] > self.best:
            self.best = metrics[task.best_metric]
            self.best_metrics = self.metrics
        self._scalars(self.metrics)
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        log.info("epoch %d of %d: %s", epoch + 1, self.cfg.epochs, values)
        return metrics

    @property
    def images_per_s(self) -> float:
        """Training images of all ranks per second of training, without evaluation and saving.

        The first step is left out: 0 until a second one has ended.
        """
        train_s = self.seconds.get("data_wait", 0.0) + self.seconds.get("compute", 0.0)
        return self.num_images / train_s if train_s else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of that time in which the loop waited for a batch, in [0, 1]."""
        wait_s, compute_s = self.seconds.get("data_wait", 0.0), self.seconds.get("compute", 0.0)
        return wait_s / (wait_s + compute_s) if compute_s else 0.0

    def _speed(self) -> str:
        return f"{self.images_per_s:.{0 if self.images_per_s >= 10 else 1}f}"

    def finish(self, num_bad_steps: int = 0) -> None:
        """Write `summary.json` and the closing summary.

        Args:
            num_bad_steps: steps that were skipped because their gradients were not finite.
        """
        self.lap("other")
        if self.rank != 0 or self.step_number == 0:
            return
        summary = {
            **self.metrics,
            "best": self.best_metrics,
            "perf/images_per_s": self.images_per_s,
            "perf/data_wait_share": self.data_wait_share,
            "seconds": {part: round(seconds, 3) for part, seconds in self.seconds.items()},
            "steps": self.step_number,
            "bad_steps": num_bad_steps,
            "world_size": self.world_size,
            "device": str(self.device),
            "script": Path(sys.argv[0]).name,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        flat = {
            key: value
            for key, value in _flatten(OmegaConf.to_container(self.cfg, resolve=True))
            if isinstance(value, int | float | str | bool)
        }
        # add_hparams() would write to a run of its own; this refers to the metrics written already.
        with self._without_tensorboard_if_it_fails():
            if self.writer is not None:
                for summary_part in hparams(flat, dict.fromkeys(self.metrics)):
                    self.writer._get_file_writer().add_summary(summary_part)
                self.writer.close()

        total = sum(self.seconds.values())
        log.info("time by part:")
        for part, seconds in self.seconds.items():
            log.info("  %-12s %8.1f s  %4.0f %%", part, seconds, 100 * seconds / total)
        if self.num_images:
            log.info(
                "%s images/s in training, %s",
                self._speed(),
                verdict(self.data_wait_share, self.cfg),
            )
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.best_metrics.items())
        log.info("best: %s", values)
        log.info("TensorBoard logs and checkpoints: %s", self.folder)

    def _open(self, loader: Loader, epoch: int) -> None:
        if self.rank != 0:
            return
        if self.writer is None:
            # Points that a resumed run is about to write again are hidden.
            purge_step = self.step_number + 1 if self.step_number else None
            with self._without_tensorboard_if_it_fails():
                self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)
        if self.cfg.log.progress and sys.stderr.isatty():
            self.bar = tqdm(
                total=len(loader),
                initial=loader.batches_done,
                desc=f"epoch {epoch + 1}/{self.cfg.epochs}",
                unit="step",
                leave=False,
                mininterval=SECONDS_BETWEEN_DRAWINGS,
            )

    def _scalars(self, values: dict[str, float]) -> None:
        with self._without_tensorboard_if_it_fails():
            if self.writer is not None:
                # All in one event: add_scalar() would write one for each value.
                summary = Summary(
                    value=[
                        Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
                    ]
                )
                self.writer._get_file_writer().add_summary(summary, self.step_number)

    @contextmanager
    def _without_tensorboard_if_it_fails(self) -> Iterator[None]:
        """A full disk is no reason to stop training here; the next epoch tries again."""
        try:
            yield
        except OSError as error:
            log.warning("TensorBoard events are lost until the next epoch: %s", error)
            self.writer = None


def verdict(data_wait_share: float, cfg: "Config") -> str:
    """What binds a training run, in short; `python -m benchmarks bottleneck` measures it closely.

    Args:
        data_wait_share: share of the training time in which the loop waited for a batch, in [0, 1].
        cfg: what is set already is not recommended.
    """
    waits = f"{data_wait_share:.0%} of the time waiting for data"
    if data_wait_share < WORTH_MENTIONING:
        return f"compute-bound: {waits}"
    options = {
        "loader.num_workers=auto": cfg.loader.num_workers != "auto",
        "loader=dali": cfg.loader.name == "pytorch",
        "loader=packed": cfg.loader.name != "packed" and not cfg.data.layout.startswith("mnist"),
    }
    advice = ", ".join(option for option, is_new in options.items() if is_new)
    return f"input-bound: {waits}; try {advice or 'smaller images'}"


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))


def _log_to(path: Path, rank: int) -> None:
    """Rank 0 logs to the console and to `path`; the others only warn on the console."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    console = logging.StreamHandler(sys.stdout if rank == 0 else sys.stderr)
    console.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    root.addHandler(console)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank == 0:
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(file)
