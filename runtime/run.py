"""Resuming, logging, saving and leaving, around the steps of a training loop."""

import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.amp import GradScaler

from loaders import Loader
from loaders.batch import num_samples, part
from runtime import preemption, report
from runtime.checkpoint import FORMAT, CheckpointWriter, read_checkpoint
from runtime.evaluate import Shown
from runtime.group import SingleProcess
from runtime.guard import NonFiniteGuard
from runtime.loggers import Loggers
from runtime.progress import Progress
from runtime.run_dir import REQUEUE_MARKER, SUMMARY, acquire_run_dir
from runtime.state import on_host, restore, rng_state, start_from
from runtime.timing import Timing
from runtime.trained import facts_of
from tasks import Task

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

VERSIONS = {"python": platform.python_version(), "torch": str(torch.__version__)}

CHECKPOINTED_FIELDS = (
    "num_epochs",
    "validated_step",
    "metrics",
    "best_metrics",
    "best",
    "best_metric",
    "best_mode",
    "epochs_without_best",
)
"""Attributes of a run that its checkpoints hold."""

RESERVED_KEYS = {"guard", "run", "format", "step", "rng", "config", "facts", "versions", "path"}
"""Keys of a checkpoint that are no parts of a script's state."""


class Run:
    """The machinery of a run: resuming, counting, logging, guarding, saving, and leaving on a signal.

    Values stay on the device until a log point (every `log.every_steps` steps). Rank 0 alone writes.

    Attributes:
        step_number: optimizer steps since the start of the run, over all resumes.
        precision: dtype that the model computes in.
        eval_model: model that is evaluated, whose best weights become `model.safetensors`.
        is_last_micro_batch: the current batch is the last one of its optimizer step.
    """

    def __init__(
        self,
        cfg: "Config",
        device: torch.device,
        state: dict[str, Any],
        group: SingleProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make `cfg.output_dir` this run's folder.

        Args:
            cfg: configuration of the run.
            device: of this process.
            state: parts by name that are saved and restored, before they are wrapped: every script then has
                the same keys. At least `model`, `optimizer`, `scheduler` and `loader`.
            group: processes of the run; default: this one.
            clock: seconds since some moment, for `checkpoint.every_minutes`.

        Raises:
            UserError: another run writes to the folder.
            ValueError: a part has a name of `RESERVED_KEYS`.
        """
        if reserved := sorted(RESERVED_KEYS & state.keys()):
            raise ValueError(f"state: {', '.join(reserved)} is reserved; use another name")
        self.cfg, self.device, self.group = cfg, device, group or SingleProcess()
        self.model, self.scheduler = state["model"], state["scheduler"]
        self.loader: Loader = state["loader"]
        self.run_dir = Path(
            HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else cfg.output_dir
        )
        self.checkpoints = self.run_dir / "checkpoints"
        self.guard = NonFiniteGuard(
            cfg, self.model, state["optimizer"], self.loader, self.checkpoints
        )
        self.state = {**state, "guard": self.guard, "run": self}
        self.writer = CheckpointWriter(cfg.checkpoint, self.checkpoints)
        self.clock = clock
        self.last_save = clock()
        self.loggers = Loggers(cfg.log.to, self.run_dir)
        self.progress = Progress(cfg.log.progress and self.group.rank == 0)

        self.precision = torch.float32
        self.eval_model: nn.Module = self.model
        self.is_last_micro_batch = True
        self.step_number = self.num_epochs = 0
        self.validated_step = -1
        self.num_bad_samples: dict[str, int] = {}
        self.metrics: dict[str, float] = {}
        self.best_metrics: dict[str, float] = {}
        # The higher, the better; of a metric whose lowest value is best, with the other sign.
        self.best = float("-inf")
        self.best_metric, self.best_mode = "", "max"
        self.epochs_without_best = 0
        self.lr = 0.0
        self.loss_sum = torch.zeros((), device=device)
        self.losses_in_sum = 0.0
        self.grad_norm = torch.zeros(())
        self.epoch_losses: list[tuple[float, float]] = []

        self.group.broadcast_from_rank0(lambda: acquire_run_dir(cfg, self.run_dir))
        preemption.listen()
        self.timing = Timing(device)

    def resume(self) -> None:
        """Load the checkpoint that `cfg.resume` names, else those of `cfg.model.weights` that fit.

        To be called before the model is wrapped.

        Raises:
            UserError: `cfg.resume` or `cfg.model.weights` names no file that can be read, the checkpoint is
                of another model or of other data, its plan differs, or no weight fits.
        """
        cfg = self.cfg
        # Rank 0 reads for all ranks, whose disks may differ.
        saved = self.group.broadcast_from_rank0(
            lambda: read_checkpoint(cfg.resume, self.checkpoints)
        )
        if saved is not None:
            try:
                restore(cfg, self.state, saved, self.group)
            except Exception as error:
                error.add_note(f"while loading {saved['path']}")
                raise
            self.step_number = self.loader.epoch * len(self.loader) + self.loader.batches_done
            log.info("resumed from %s: step %d", saved["path"], self.step_number)
        elif cfg.model.weights is not None:
            start_from(cfg, self.model, self.loader, self.group)
        self.guard.keep_statistics()

    def state_dict(self) -> dict[str, Any]:
        """Progress of the run, besides the parts of `state`."""
        finished = {"epoch_is_finished": is_finished(self.loader)}
        return finished | {name: getattr(self, name) for name in CHECKPOINTED_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in CHECKPOINTED_FIELDS:
            if name in state:  # not in checkpoints of before the field was added
                setattr(self, name, state[name])
        self.writer.best = self.best, self.best_metrics

    # The loop

    def epochs(self) -> Iterator[int]:
        """Numbers of the epochs that are left, from 0, until `max_steps` or `early_stopping.patience` is reached."""
        if self.group.rank == 0:  # not before the run is known to go on
            OmegaConf.save(report.settings(self.cfg), self.run_dir / "config.yaml")
            script, settings = Path(sys.argv[0]).name, report.changed_settings(self.cfg)
            facts = {"script": script, "settings": settings} | self._facts()
            report.write_json(self.run_dir / "run.json", facts)
            self._warn_of_other_techniques()
        place = f"{report.name(self.precision)} on {self.device}"
        ranks = self.group.world_size
        for line in report.opening_lines(self.cfg, self.loader, self.model, place, ranks):
            log.info(line)
        start = max(self.loader.epoch, self.num_epochs)
        is_validated = self.step_number == self.validated_step
        reasons = {
            "epochs": start >= self.cfg.epochs,
            "max_steps": self._is_at_max_steps() and is_validated,
            "early_stopping.patience": self._is_out_of_patience(),
        }
        if any(reasons.values()):
            log.info(
                "nothing to do: the run was finished with epoch %d (step %d); raise %s to go on",
                *(self.num_epochs, self.step_number),
                " and ".join(key for key, is_reached in reasons.items() if is_reached),
            )
            return
        for epoch in range(start, self.cfg.epochs):
            yield epoch
            if self._is_at_max_steps() or self._is_out_of_patience():
                break

    def batches(self, loader: Loader, num_micro_batches: int = 1) -> Iterator[tuple[Any, Any]]:
        """Batches of the loader until `max_steps`; the time waiting for each and using it is measured.

        Args:
            loader: of the training split.
            num_micro_batches: equal parts in which each batch comes, one after the other.
        """
        self.step_number = loader.epoch * len(loader) + loader.batches_done
        self.epoch_losses = []
        is_start = self.step_number == 0 and self.group.rank == 0  # part: accumulate
        if is_start and num_micro_batches != self.cfg.accumulate_steps:  # part: accumulate
            log.warning(
                "accumulate_steps=%d has no effect in this script", self.cfg.accumulate_steps
            )
        self._open(loader)
        self.timing.lap("other")
        # An epoch that was stopped after its last step has only its validation left.
        batches = iter(()) if is_finished(loader) else iter(loader)
        while not self._is_at_max_steps():
            with self.timing.data_wait():
                batch = next(batches, None)
            if batch is None:
                break
            count = num_samples(batch)
            self.timing.step(count * self.group.world_size)
            self.lr = float(self.scheduler.get_last_lr()[0])
            size = count // num_micro_batches  # a divisor, see check_ranks()
            for number in range(num_micro_batches):
                self.is_last_micro_batch = number == num_micro_batches - 1
                yield part(batch, number * size, (number + 1) * size) if size < count else batch
            if self.step_number == 1 and self.cfg.log.images and self.group.rank == 0:
                images = loader.info.pictures(part(batch[0], 0, self.cfg.log.images))
                if images is not None:
                    self.loggers.log({"train/inputs": images}, self.step_number)
            self.timing.end_step()
        if self.losses_in_sum:
            self._log_point()
        self.progress.close()
        self._save_or_leave(self.group.pending_flags())

    def skip_if_not_finite(self, grad_norm: Tensor, scaler: GradScaler | None = None) -> None:
        """To be called before `optimizer.step()`, which will change nothing if the norm is not finite.

        Args:
            grad_norm: L2 norm of all gradients, equal on all ranks.
            scaler: of mixed precision; a step that it skips is no bad step while its scale is above 1.

        Raises:
            UserError: `max_bad_steps` steps in a row were bad.
        """
        self.guard.check(grad_norm, scaler)

    def record_micro_batch(self, loss: Tensor) -> None:
        """Record the loss of a batch that does not end its optimizer step, divided by the number of parts."""
        self.loss_sum += loss.detach()

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record one optimizer step; save if it is time to, leave after a signal.

        All ranks save or leave at the same step, by rank 0's clock or a signal to any of them; with several
        ranks, one step later.

        Args:
            loss: mean over this rank's batch.
            grad_norm: L2 norm of all gradients, before clipping.

        Raises:
            SystemExit: with `preemption.EXIT_CODE`, after saving.
        """
        self.record_micro_batch(loss)
        self.losses_in_sum += 1
        self.step_number += 1
        self.grad_norm = grad_norm
        if self.step_number % self.cfg.log.every_steps == 0:
            self._log_point()
        self.progress.step()
        every_steps = self.cfg.checkpoint.every_steps
        is_step = every_steps is not None and self.step_number % every_steps == 0
        flags = [preemption.is_requested(), not is_step and self._is_time_to_save()]
        agreement = self.group.any_rank(flags)
        self._save_or_leave(agreement, is_step)

    def epoch(self, task: Task, totals: Tensor, shown: Shown = ()) -> None:
        """Record the validation after an epoch, and save.

        Args:
            task: turns the totals into metrics and the shown images into pictures.
            totals: sums of `evaluate()` over the whole validation split.
            shown: inputs, outputs and targets of some images.
        """
        self.timing.lap("validation")
        metrics = task.metrics(totals)
        self.metrics = {f"val/{name}": value for name, value in metrics.items()}
        self.best_metric, self.best_mode = f"val/{task.best_metric}", task.best_mode
        self.num_epochs = self.loader.epoch + is_finished(self.loader)
        self.validated_step = self.step_number
        self.loggers.log({**self.metrics, **self._pictures(task, totals, shown)}, self.step_number)
        self.timing.lap("validation")
        log.info(
            "epoch %d of %d: %s",
            *(
                self.loader.epoch + 1,
                self.cfg.epochs,
                report.listed(self._train_loss() | self.metrics),
            ),
        )
        value = metrics[task.best_metric]
        self._save(-value if task.best_mode == "min" else value)

    def finish(self) -> None:
        """Wait for the checkpoint; write `summary.json`, unless no step was made, and the closing lines."""
        self.best, self.best_metrics = self.writer.wait()
        self.timing.end()
        if self.group.rank != 0:
            return
        (self.run_dir / REQUEUE_MARKER).unlink(missing_ok=True)
        if not (self.run_dir / SUMMARY).exists():  # else there was nothing left to do
            report.write_json(self.run_dir / SUMMARY, self._summary())
        self.loggers.close()
        for line in report.closing_lines(self.cfg, self.timing, self.best_metrics):
            log.info(line)
        log.info("TensorBoard logs and checkpoints: %s", self.run_dir)

    def _summary(self) -> dict[str, Any]:
        return {
            **self.metrics,
            "best": self.best_metrics,
            "best_metric": self.best_metric,
            "best_mode": self.best_mode,
            "perf/images_per_s": self.timing.images_per_s,
            "perf/data_wait_share": self.timing.data_wait_share,
            "seconds": {part: round(s, 3) for part, s in self.timing.seconds.items()},
            "steps": self.step_number,
            "bad_steps": self.guard.num_bad_steps,
            "bad_samples": self.num_bad_samples,
            "device": str(self.device),
            "versions": VERSIONS,
            **self._setting(),
        }

    def _facts(self) -> dict[str, Any]:
        """Facts that are written with the weights."""
        return facts_of(self.loader) | {"precision": report.name(self.precision)}

    def _setting(self) -> dict[str, float | str | bool]:
        """Properties that runs are compared by, besides their configuration."""
        return {
            "script": Path(sys.argv[0]).name,
            "world_size": self.group.world_size,
            "precision": report.name(self.precision),
        }

    # The log

    def _warn_of_other_techniques(self) -> None:
        """Name the keys that were set for a technique that this script does not have."""
        is_used: dict[str, bool] = {}
        is_used["amp"] = self.precision is not torch.float32  # part: amp
        is_used["ema"] = self.eval_model is not self.model  # part: ema
        is_used["distributed"] = type(self.group) is not SingleProcess  # part: ranks
        for group in (name for name in is_used if not is_used[name]):
            config = getattr(self.cfg, group)
            for key, default in asdict(type(config)()).items():
                if (value := getattr(config, key)) != default:
                    log.warning("%s.%s=%s has no effect in this script", group, key, value)

    def _is_at_max_steps(self) -> bool:
        return self.cfg.max_steps is not None and self.step_number >= self.cfg.max_steps

    def _is_out_of_patience(self) -> bool:
        patience = self.cfg.early_stopping.patience
        return patience is not None and self.epochs_without_best >= patience

    def _open(self, loader: Loader) -> None:
        if self.group.rank != 0:
            return
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        settings = self._setting() | report.changed_settings(self.cfg)
        self.loggers.open(settings, self.step_number)
        name = f"epoch {loader.epoch + 1}/{self.cfg.epochs}"
        self.progress.open(name, loader.batches_done, len(loader))

    def _log_point(self) -> None:
        """Log the mean loss since the last log point and the other values of the current step."""
        if self.cfg.data.on_error == "skip":
            self._count_bad_samples()
        loss = self.group.mean(self.loss_sum / self.losses_in_sum).item()
        self.timing.finished()
        self.epoch_losses.append((loss, self.losses_in_sum))
        self.loss_sum.zero_()
        self.losses_in_sum = 0.0
        if self.group.rank != 0:
            return
        norm = self.grad_norm.item()
        points = {"train/loss": loss, "train/lr": self.lr, "train/grad_norm": norm}
        line = f"loss {loss:.4f}"
        if self.timing.num_images:
            points["perf/images_per_s"] = self.timing.images_per_s
            points["perf/data_wait_share"] = self.timing.data_wait_share
            line += f", {self.timing.speed()}, {self.timing.data_wait_share:.0%} waiting for data"
        self.loggers.log(points, self.step_number)
        self.progress.show(self.step_number, line)

    def _pictures(self, task: Task, totals: Tensor, shown: Shown) -> dict[str, Tensor]:
        if self.group.rank != 0 or not self.cfg.log.images or not shown:
            return {}
        inputs, outputs, targets = part(shown, 0, self.cfg.log.images)
        images = self.loader.info.pictures(inputs)
        pictures = {} if images is None else task.visualize(images, outputs, targets)
        pictures |= task.plots(totals)
        return {f"val/{name}": images for name, images in pictures.items()}

    def _count_bad_samples(self) -> None:
        """Exchange the bad samples that each rank has found; `data.max_bad_samples` is for all ranks together."""
        self.num_bad_samples = self.loader.share_bad_samples(self.group.gather)

    def _train_loss(self) -> dict[str, float]:
        """Mean over the steps of the epoch that this process has made, if any."""
        num_steps = sum(count for _, count in self.epoch_losses)
        total = sum(loss * count for loss, count in self.epoch_losses)
        return {"train/loss": total / num_steps} if num_steps else {}

    # Checkpoints

    def _is_time_to_save(self) -> bool:
        """True once for each interval, by rank 0's clock; the agreement of the ranks may come a step later."""
        minutes = self.cfg.checkpoint.every_minutes
        if self.group.rank != 0 or minutes is None:
            return False
        now = self.clock()
        if now - self.last_save < 60 * minutes:
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
        # torchrun ends all ranks as soon as one has left: not before the file is complete.
        self.group.gather(None)
        if self.group.rank == 0:
            (self.run_dir / REQUEUE_MARKER).touch()
            log.warning(
                "stopped by a signal: saved at step %d; go on with output_dir=%s resume=auto",
                self.step_number,
                self.run_dir,
            )
        sys.exit(preemption.EXIT_CODE)

    def _save(self, value: float | None = None) -> None:
        """Save the current state.

        Every rank calls this. Rank 0 copies the state to the host and writes in the background, after
        an earlier write has ended.

        Args:
            value: of the metric that chooses the best epoch, the higher, the better; None: not after a validation.
        """
        self.guard.settle()
        self._count_bad_samples()
        # A checkpoint that could not be written is not the best one.
        self.best, self.best_metrics = self.group.broadcast_from_rank0(self.writer.wait)
        is_best = False
        if value is not None:
            is_best = value > self.best
            self.epochs_without_best = 0 if is_best else self.epochs_without_best + 1
            if is_best:
                self.best, self.best_metrics = value, self.metrics
        self.loggers.flush()  # the log reaches at least as far as the checkpoint
        self.timing.finished()
        state = {name: on_host(part.state_dict(), self.group) for name, part in self.state.items()}
        weights = state["model"]
        if is_best and self.eval_model is not self.model:
            weights = on_host(self.eval_model.state_dict(), self.group)
        rng = self.group.gather(rng_state())
        self.last_save = self.clock()
        if self.group.rank == 0:
            state |= {
                "format": FORMAT,
                "step": self.step_number,
                "rng": rng,
                "config": report.settings(self.cfg),
                "facts": self._facts(),
                "versions": VERSIONS,
            }
            self.writer.write(state, weights if is_best else None)
        self.timing.lap("saving")


def is_finished(loader: Loader) -> bool:
    """Whether all batches of the epoch have been used."""
    return loader.batches_done >= len(loader)
