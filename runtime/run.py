"""What happens around the steps of a training loop."""

import logging
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.amp import GradScaler
from tqdm import tqdm

from loaders import Loader
from runtime import preemption, report
from runtime.board import Board
from runtime.checkpoint import CheckpointWriter, read_checkpoint
from runtime.evaluate import Shown
from runtime.folder import REQUEUE_MARKER, SUMMARY, claim
from runtime.group import Alone
from runtime.guard import NonFiniteGuard
from runtime.state import on_host, restore, rng_state
from runtime.timing import Timing
from tasks import Task

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

SECONDS_BETWEEN_PLAIN_LINES = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.5

REACHED = ("num_epochs", "validated_step", "metrics", "best_metrics", "best", "best_metric")
"""Attributes of a run that its checkpoints hold."""


class Run:
    """Resumes, counts, logs, guards, saves, and leaves when it is asked to.

    Values stay on the device until a log point (every `log.every_steps` steps). Rank 0 alone writes.

    Attributes:
        step_number: optimizer steps since the start of the run, also over resumes.
        precision: what the model computes in, as the log calls it.
        published: the model that is evaluated, whose best weights become `model.safetensors`.
        ends_step: whether the current batch is the last one of its optimizer step.
    """

    def __init__(
        self,
        cfg: "Config",
        device: torch.device,
        state: dict[str, Any],
        group: Alone | None = None,
    ) -> None:
        """Load what `cfg.resume` names, if anything.

        Args:
            cfg: the whole configuration.
            device: of this process.
            state: by name, all that is saved and restored, as it is before it is wrapped, so that every
                script has the same keys. At least `model`, `optimizer`, `scheduler` and `loader`.
            group: the processes of the run; default: this one alone.

        Raises:
            FileNotFoundError: `cfg.resume` is a path and nothing is there.
            ValueError: no checkpoint can be read, it is of another model, or its plan differs.
        """
        self.cfg, self.device, self.group = cfg, device, group or Alone()
        self.model, self.scheduler = state["model"], state["scheduler"]
        self.loader: Loader = state["loader"]
        # Looked up in each step, where a lookup in the configuration would take time.
        self.max_steps, self.log_every, self.save_every, self.save_minutes = (
            *(cfg.max_steps, cfg.log.every_steps),
            *(cfg.checkpoint.every_steps, cfg.checkpoint.every_minutes),
        )
        self.folder = Path(
            HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else cfg.output_dir
        )
        self.checkpoints = self.folder / "checkpoints"
        self.guard = NonFiniteGuard(
            cfg, self.model, state["optimizer"], self.loader, self.checkpoints
        )
        self.state = {**state, "guard": self.guard, "run": self}
        self.writer = CheckpointWriter(cfg.checkpoint, self.checkpoints)
        self.last_save = time.monotonic()
        self.board = Board(self.folder)
        self.bar: Any = None
        self.last_plain_line = 0.0

        self.precision = torch.float32
        self.published: nn.Module = self.model
        self.ends_step = True
        self.step_number = self.num_epochs = 0
        self.validated_step = -1
        self.metrics: dict[str, float] = {}
        self.best_metrics: dict[str, float] = {}
        self.best, self.best_metric = float("-inf"), ""
        self.lr = 0.0
        self.loss_sum = torch.zeros((), device=device)
        self.losses_in_sum = 0.0
        self.epoch_losses: list[tuple[float, float]] = []

        self.group.from_rank_0(lambda: claim(cfg, self.folder))
        preemption.listen()
        # Rank 0 reads for all: they go on from the same file also where disks are not shared.
        saved = self.group.from_rank_0(lambda: read_checkpoint(cfg.resume, self.checkpoints))
        if saved is not None:
            restore(cfg, self.state, saved, self.group)
            self.guard.start_from_here()
            self.step_number = self.loader.epoch * len(self.loader) + self.loader.batches_done
            log.info("resumed from %s: step %d", saved["path"], self.step_number)
        if self.group.rank == 0:  # not before the run is known to go on
            OmegaConf.save(cfg, self.folder / "config.yaml", resolve=True)
            report.write_start(self)
        self.timing = Timing(device)

    def state_dict(self) -> dict[str, Any]:
        """What the run has reached so far, beside the parts of `state`."""
        finished = {"epoch_is_finished": self.loader.epoch_is_finished}
        return finished | {name: getattr(self, name) for name in REACHED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in REACHED:
            setattr(self, name, state.get(name, getattr(self, name)))

    # The loop

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, from 0; the last one can end early at `max_steps`."""
        log.info(report.headline(self))
        start = max(self.loader.epoch, self.num_epochs)
        is_validated = self.step_number == self.validated_step
        if start >= self.cfg.epochs or (self._is_at_max_steps() and is_validated):
            log.info(
                "nothing to do: the run was finished with epoch %d (step %d); raise epochs=%d%s to go on",
                *(self.num_epochs, self.step_number, self.cfg.epochs),
                f" or max_steps={self.max_steps}" if self.max_steps else "",
            )
            return
        for epoch in range(start, self.cfg.epochs):
            yield epoch
            if self._is_at_max_steps():
                break

    def batches(self, loader: Loader, num_parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's batches until `max_steps`; the time waiting for each and using it is counted.

        Args:
            loader: the training loader.
            num_parts: each batch comes in so many equal parts, one after the other.
        """
        self.step_number = loader.epoch * len(loader) + loader.batches_done
        self.epoch_losses = []
        self._open(loader)
        self.timing.lap("other")
        # One that was stopped after its last step only has its validation left.
        batches = iter(()) if loader.epoch_is_finished else iter(loader)
        while not self._is_at_max_steps():
            with self.timing.data_wait():
                batch = next(batches, None)
            if batch is None:
                break
            self.timing.step(len(batch[0]) * self.group.world_size)
            if self.step_number == 0 and self.cfg.log.images and self.group.rank == 0:
                images = loader.denormalize(batch[0][: self.cfg.log.images])
                self.board.images("train/inputs", images, 0)
            self.lr = float(self.scheduler.get_last_lr()[0])
            parts = [batch]
            if num_parts > 1:
                parts = list(zip(*(b.chunk(num_parts) for b in batch), strict=True))
            for part in parts:
                self.ends_step = part is parts[-1]
                yield part
            self.timing.end_step()
        if self.losses_in_sum:
            self._log_point({})
        if self.bar is not None:
            self.bar.close()
        # Validation reads, too, and could not save if it was kept waiting.
        self._save_or_leave(self.group.last_agreement(), is_step=self.loader.index.is_remote)

    def skip_if_not_finite(self, grad_norm: Tensor, scaler: GradScaler | None = None) -> None:
        """To be called before `optimizer.step()`, which will change nothing if the norm is not finite.

        Args:
            grad_norm: L2 norm of all gradients, alike on all ranks.
            scaler: what it will skip anyway is not a bad step, as long as its scale is above 1.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad.
        """
        self.guard.check(grad_norm, scaler)

    def part_of_step(self, loss: Tensor) -> None:
        """Record a batch that does not end its optimizer step: its share of the step's loss."""
        self.loss_sum += loss.detach()

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record one optimizer step; save if it is time to, leave if the run was asked to.

        All ranks save or leave at the same step, by rank 0's clock or a signal to any of them; with several
        ranks, that is the step after.

        Args:
            loss: mean over this rank's batch.
            grad_norm: L2 norm of all gradients, before clipping.

        Raises:
            SystemExit: with `preemption.EXIT_CODE`, after saving.
            StorageError: the data of some rank stays away, after saving.
        """
        self.part_of_step(loss)
        self.losses_in_sum += 1
        self.step_number += 1
        if self.step_number % self.log_every == 0:
            self._log_point({"train/grad_norm": grad_norm})
        if self.bar is not None:
            self.bar.update()
        is_step = self.save_every is not None and self.step_number % self.save_every == 0
        is_over = preemption.is_requested() or self.loader.failed is not None
        agreement = self.group.agree([is_over, not is_step and self._is_time_to_save()])
        self._save_or_leave(agreement, is_step)

    def epoch(self, task: Task, totals: Tensor, shown: Shown = ()) -> None:
        """Record the validation after an epoch, and save.

        Args:
            task: turns the totals into metrics, says which of them chooses the best epoch, and draws.
            totals: `evaluate()`'s sums over the whole validation split.
            shown: inputs, outputs and targets of images to look at, if there are any.
        """
        self.timing.lap("validation")
        metrics = task.metrics(totals)
        self.metrics = {f"val/{name}": value for name, value in metrics.items()}
        self.best_metric = f"val/{task.best_metric}"
        is_best = metrics[task.best_metric] > self.best
        if is_best:
            self.best, self.best_metrics = metrics[task.best_metric], self.metrics
        self.num_epochs = self.loader.epoch + self.loader.epoch_is_finished
        self.validated_step = self.step_number
        self.board.scalars(self.metrics, self.step_number)
        self._draw(task, totals, shown)
        self.timing.lap("validation")
        log.info(
            "epoch %d of %d: %s",
            *(
                self.loader.epoch + 1,
                self.cfg.epochs,
                report.listed(self._train_loss() | self.metrics),
            ),
        )
        self._save(is_best)

    def finish(self) -> None:
        """Wait until all is written; write `summary.json`, unless nothing was done, and the closing lines."""
        self.writer.wait()
        self.timing.end()
        if self.group.rank == 0:
            (self.folder / REQUEUE_MARKER).unlink(missing_ok=True)
            report.close(self)

    # The log

    def _is_at_max_steps(self) -> bool:
        return self.max_steps is not None and self.step_number >= self.max_steps

    def _open(self, loader: Loader) -> None:
        if self.group.rank != 0:
            return
        (self.folder / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        self.board.open(self.step_number)
        if self.cfg.log.progress and sys.stderr.isatty():
            self.bar = tqdm(
                total=len(loader),
                initial=loader.batches_done,
                desc=f"epoch {loader.epoch + 1}/{self.cfg.epochs}",
                unit="step",
                leave=False,
                mininterval=SECONDS_BETWEEN_DRAWINGS,
            )

    def _log_point(self, values: dict[str, Tensor]) -> None:
        """Log the mean loss since the last time, and these values, after the current step."""
        self._count_bad_samples()
        loss = self.group.mean(self.loss_sum / self.losses_in_sum).item()
        self.timing.finished()
        self.epoch_losses.append((loss, self.losses_in_sum))
        self.loss_sum.zero_()
        self.losses_in_sum = 0.0
        if self.group.rank != 0:
            return
        points = {"train/loss": loss, "train/lr": self.lr}
        points |= {tag: value.item() for tag, value in values.items()}
        line = f"loss {loss:.4f}"
        if self.timing.num_images:
            points["perf/images_per_s"] = self.timing.images_per_s
            points["perf/data_wait_share"] = self.timing.data_wait_share
            line += f", {self.timing.speed()}, {self.timing.data_wait_share:.0%} waiting for data"
        self.board.scalars(points, self.step_number)
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
        elif time.perf_counter() - self.last_plain_line > SECONDS_BETWEEN_PLAIN_LINES:
            self.last_plain_line = time.perf_counter()
            log.info("step %d: %s", self.step_number, line)

    def _draw(self, task: Task, totals: Tensor, shown: Shown) -> None:
        if self.group.rank != 0 or not self.cfg.log.images or not shown:
            return
        inputs, outputs, targets = (part[: self.cfg.log.images] for part in shown)
        pictures = task.show(self.loader.denormalize(inputs), outputs, targets)
        for name, images in (pictures | task.charts(totals)).items():
            self.board.images(f"val/{name}", images, self.step_number)

    def _count_bad_samples(self) -> None:
        """Tell all ranks of the samples that any of them has set aside; the limit is for all together."""
        if self.cfg.data.on_error == "skip":
            for found in self.group.gather(self.loader.bad_samples()):
                self.loader.add_bad_samples(found)

    def _train_loss(self) -> dict[str, float]:
        """The mean over the epoch's steps, as far as this process has made any."""
        num_steps = sum(count for _, count in self.epoch_losses)
        total = sum(loss * count for loss, count in self.epoch_losses)
        return {"train/loss": total / num_steps} if num_steps else {}

    # Checkpoints

    def _is_time_to_save(self) -> bool:
        """By rank 0's clock, and once: the ranks' answer may come a step late."""
        if self.group.rank != 0 or self.save_minutes is None:
            return False
        now = time.monotonic()
        if now - self.last_save < 60 * self.save_minutes:
            return False
        self.last_save = now
        return True

    def _save_or_leave(self, agreement: list[bool], is_step: bool = False) -> None:
        leave, is_time = agreement or (False, False)
        if leave or is_time or is_step:
            self._save()
        if not leave:
            return
        self.writer.wait()
        # torchrun ends all ranks as soon as one has left: not before the file is whole.
        failed = [error for error in self.group.gather(self.loader.failed) if error is not None]
        for error in failed:
            log.warning(
                "saved at step %d; go on with output_dir=%s resume=auto",
                *(self.step_number, self.folder),
            )
            raise error
        if self.group.rank == 0:
            (self.folder / REQUEUE_MARKER).touch()
            log.warning(
                "asked to leave: saved at step %d; go on with output_dir=%s resume=auto",
                self.step_number,
                self.folder,
            )
        sys.exit(preemption.EXIT_CODE)

    def _save(self, is_best: bool = False) -> None:
        """Save the state as it is now.

        Every rank calls this. Rank 0 copies the state to the host and writes in the background, after
        an earlier write has ended.
        """
        self.guard.settle()
        self._count_bad_samples()
        self.board.flush()  # what a checkpoint has seen is in the log
        self.timing.finished()
        state = {name: on_host(part.state_dict(), self.group) for name, part in self.state.items()}
        weights = state["model"]
        if is_best and self.published is not self.model:
            weights = on_host(self.published.state_dict(), self.group)
        rng = self.group.gather(rng_state())
        self.last_save = time.monotonic()
        if self.group.rank == 0:
            state |= {
                "step": self.step_number,
                "rng": rng,
                "config": OmegaConf.to_container(self.cfg, resolve=True),
                "versions": {
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
            }
            state["facts"] = report.facts(self) | {"precision": report.name(self.precision)}
            self.writer.write(state, weights if is_best else None)
        self.timing.lap("saving")
