"""A training run: what happens around the steps of a training loop."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.check import values_of
from conf.errors import counted
from conf.schema import Config
from loaders import Loader
from runtime import preemption
from runtime.checkpoint import CheckpointWriter
from runtime.checkpoint_files import read_checkpoint
from runtime.evaluate import Shown
from runtime.finite import FiniteCheck, state_dicts
from runtime.process_group import ProcessGroup
from runtime.profile import profiler_of
from runtime.progress import Progress
from runtime.report import Report
from runtime.resume import restore, start_from_weights
from runtime.run_dir import acquire_run_dir
from runtime.timing import Timer
from tasks import Task

log = logging.getLogger(__name__)

RESERVED_KEYS = {"progress", "epoch_is_finished", "step", "rng", "weights"}
RESERVED_KEYS |= {"config", "facts", "path", "shards"}
"""Keys of a checkpoint that a script's state cannot have."""


SAVE, LEAVE = 1, 2
"""What a rank may ask all ranks for: a checkpoint, and to exit after it."""


class Run:
    """A training run: resumes, counts, logs and saves steps, and exits after a signal.

    Values stay on the device until a log point, every `log.every_steps` steps. Only rank 0 writes.

    A step ends in `step()`, once. Its number is that of the loader's batch: a batch that the loop
    leaves out by `continue` counts as a step that was not made.
    """

    def __init__(
        self,
        cfg: Config,
        device: torch.device,
        state: dict[str, Any],
        group: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        precision: torch.dtype = torch.float32,
        weights: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        """Make `cfg.output_dir` this run's folder; raise UserError if another run writes to it.

        Args:
            state: what is saved and restored, by name, before the model is wrapped: every script
                then has the same keys. At least `model`, `optimizer`, `scheduler` and `loader`.
            group: processes of the run; default: this one.
            precision: dtype that the model computes in.
            weights: function that returns the weights, by name, that are evaluated and, of the best
                epoch, become `model.safetensors`; default: the model's.
        """
        if reserved := sorted(RESERVED_KEYS & state.keys()):
            raise ValueError(f"state: {', '.join(reserved)} is reserved; use another name")
        self.cfg, self.device, self.group = cfg, device, group or ProcessGroup()
        self.state, self.loader = state, state["loader"]
        self.precision, self.weights = precision, weights
        self.run_dir = Path(cfg.output_dir)
        self.max_steps = cfg.max_steps or sys.maxsize
        self.num_steps = min(cfg.epochs * len(self.loader), self.max_steps)
        self.progress = Progress()
        self.clock, self.saved_at, self.saved_step = clock, clock(), 0
        self.learning_rate = 0.0  # of the current step
        self.grad_norms: list[Tensor] = []  # of the steps since the last log point

        self.timer = Timer(device, self.group, cfg.global_batch_size, clock)
        self.profiler = profiler_of(cfg.profile, self.run_dir, self.group.rank, device)
        self.report = Report(cfg, self.loader, self.timer, precision, self.num_steps)
        # What its thread sends must not mix with the messages of the training.
        writers = self.group.duplicate(cfg.distributed.timeout_s)
        self.writer = CheckpointWriter(cfg.checkpoint, self.run_dir / "checkpoints", writers)
        self.finite = FiniteCheck(state, self.report.batches, self.group, self.writer)
        self.group.broadcast_from_rank0(lambda: acquire_run_dir(cfg, self.run_dir))

    def resume(self) -> None:
        """Load the checkpoint that `cfg.resume` names, or else initial weights, if any are named;
        to be called before the model is wrapped. Raises a UserError if they do not fit."""
        # Rank 0 reads for all ranks, whose disks may differ.
        saved = self.group.broadcast_from_rank0(
            lambda: read_checkpoint(self.cfg.resume, self.run_dir / "checkpoints")
        )
        if saved is not None:
            restore(self.cfg, self.state, saved, self.group)
            self.progress = Progress(**saved["progress"])
            self.saved_step = self.step_number
            log.info("resumed from %s: step %d", saved["path"], self.step_number)
        else:
            start_from_weights(self.cfg, self.state["model"], self.loader, self.group)
        self.finite.start()
        preemption.begin()  # not before: reading a large checkpoint takes minutes

    @property
    def step_number(self) -> int:
        """Number of the step whose batch was yielded last, from 1, over all resumes; before the
        first step 0."""
        return self.loader.steps_done

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from 0, until the run has ended."""
        progress = self.progress
        epochs = range(max(self.loader.epoch, progress.num_epochs), self.cfg.epochs)
        is_at_end = self.step_number >= self.num_steps
        lacks_validation = is_at_end and self.step_number != progress.validated_step
        if not epochs or (self._has_ended() and not lacks_validation):
            log.info(
                "nothing to do: the run has ended after epoch %d (step %d); to train on, raise "
                "epochs, max_steps or early_stopping.patience",
                progress.num_epochs,
                self.step_number,
            )
            return
        self.timer.watch(self.state["model"])
        self.report.open(self.state["model"])
        # An error that ends the loop drops this generator, which ends these.
        with self.report.closing_loggers(), self.profiler or nullcontext():
            for epoch in epochs:
                yield epoch
                if self._has_ended():
                    break
                # A signal during the validation, or where the loop left it out
                if any(self.group.gather(self._is_signalled())):
                    self._act_on(LEAVE)

    def batches(self, loader: Loader) -> Iterator[Any]:
        """Yield the training batches that are left of the epoch; time the wait for each."""
        self.report.open_epoch()
        self.timer.lap("other")
        # An epoch that was stopped after its last step has only its validation left.
        batches = iter(()) if loader.is_finished else iter(loader)
        # The last epoch is read to its end, too: it may be resumed with more of them.
        while self.step_number < self.max_steps:
            self.timer.mark("rest")
            batch = next(batches, None)
            self.timer.mark("data_wait")
            if batch is None:
                break
            self.learning_rate = float(self.state["optimizer"].param_groups[0]["lr"])
            yield batch
            if self.step_number == 1:  # a first step that fails leaves no events
                self.report.inputs(batch)
                self.timer.lap("other")
        if self.grad_norms:
            self._log_point()
        self.report.bar.close()
        self._act_on(self.group.pending_request())

    def record_micro_batch(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch that does not end its step, divided by their number."""
        self.report.add_loss(loss)

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """End an optimizer step: record it, save if it is time to, and exit after a signal.

        All ranks save and exit at the same step; of several ranks, one step later. `loss` is the
        mean over this rank's batch, `grad_norm` the L2 norm of all gradients before clipping.
        """
        self.report.add_loss(loss)
        self.report.bar.update()
        self.grad_norms.append(grad_norm)
        self.timer.end_step()
        number, every_steps = self.step_number, self.cfg.checkpoint.every_steps
        if number % self.cfg.log.every_steps == 0:
            self._log_point()
        if self.profiler is not None:
            self.timer.lap("compute")
            self.profiler.step()
            self.timer.lap("profile")
        # Not only at a multiple: the loop may have left out that step.
        if every_steps and number // every_steps > self.saved_step // every_steps:
            self._save()
        request = SAVE if self._is_time() else 0
        self._act_on(self.group.agree(LEAVE if self._is_signalled() else request))

    def epoch(self, task: Task, totals: Tensor, shown: Shown | None = None) -> None:
        """Record a validation, and save; `totals` and `shown` are what `evaluate()` returned, with
        the sums of all ranks."""
        metrics = {f"val/{name}": value for name, value in task.metrics(totals).items()}
        self.report.validation(task, metrics, totals, shown)
        self.timer.lap("validation")
        num_epochs = self.loader.epoch + self.loader.is_finished
        is_best = self.progress.add(task, metrics, self.step_number, num_epochs)
        if is_best:
            self.progress.best_by_class = task.class_metrics(totals)
        self._save(is_best)

    def finish(self) -> None:
        """Wait for the last checkpoint, write `summary.json`, and log results."""
        self.writer.wait()
        self.timer.lap("other")
        preemption.end()
        if self.group.rank == 0:
            (self.run_dir / preemption.REQUEUE_MARKER).unlink(missing_ok=True)
        self.report.close(self.progress)
        Timer.idle_since = time.time()

    def _has_ended(self) -> bool:
        """Return True after the last step, and after too many validations without a better one."""
        patience, count = self.cfg.early_stopping.patience, self.progress.epochs_without_best
        if patience is not None and count >= patience:
            name = self.progress.best_metric
            log.info("early stopping: no better %s in %s", name, counted(count, "validation"))
            return True
        return self.step_number >= self.num_steps

    def _log_point(self) -> None:
        if not self.report.log_point(self.learning_rate, self.grad_norms):
            if not torch.stack(self.grad_norms).isfinite().any():
                self.finite.check_scale()
            self.finite.check(state_dicts(self.state))
        self.grad_norms = []
        self.timer.lap("other")

    def _is_time(self) -> bool:
        """Return True once for each `checkpoint.every_minutes`, by rank 0's clock."""
        minutes, now = self.cfg.checkpoint.every_minutes, self.clock()
        if self.group.rank != 0 or minutes is None or now - self.saved_at < 60 * minutes:
            return False
        self.saved_at = now  # other ranks may agree to save a step later
        return True

    def _is_signalled(self) -> bool:
        return preemption.signalled is not None or self.group.is_orphan()

    def _act_on(self, request: int) -> None:
        """Do what a rank has asked for."""
        if request and self.saved_step != self.step_number:
            self._save()
        if request == LEAVE:
            # torchrun ends all ranks as soon as one has left: not before the file is complete.
            self.writer.wait()
            preemption.leave(self.run_dir, self.step_number, self.group.rank)

    def _save(self, is_best: bool = False) -> None:
        """Copy the state to the host and write it in the background; every rank calls it."""
        self.timer.finish_steps()  # what follows, as the wait for the previous write, is no step
        self.writer.wait()
        state = state_dicts(self.state)
        self.finite.check(state)
        # Those of the best state are published, or else used from the newest checkpoint.
        if self.weights is not None and (is_best or not self.cfg.checkpoint.best):
            state["weights"] = self.weights()
        state |= {
            "config": values_of(self.cfg),
            "facts": self.report.facts,
            "progress": vars(self.progress),
            "rng": self.group.gather(rng_state()),
            "step": self.step_number,
            "epoch_is_finished": self.loader.is_finished,
        }
        self.writer.write(state, is_best)
        self.saved_step, self.saved_at = self.step_number, self.clock()
        self.timer.lap("saving")


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators, by device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
