"""A training run: what happens around the steps of a training loop."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from torch import Tensor, nn
from torch.amp import GradScaler

from conf.schema import Config
from loaders import Loader
from loaders.batch import num_samples, part
from runtime import preemption
from runtime.checkpoint import FORMAT, CheckpointWriter, read_checkpoint
from runtime.evaluate import Shown
from runtime.finetune import start_from
from runtime.group import SingleProcess
from runtime.guard import NonFiniteGuard
from runtime.profile import profiler_of
from runtime.recorder import VERSIONS, Recorder
from runtime.run_dir import acquire_run_dir
from runtime.state import on_host, restore, rng_state, settings
from runtime.timing import Timing
from tasks import Task

log = logging.getLogger(__name__)

CHECKPOINTED_FIELDS = (
    "num_epochs",
    "validated_step",
    "metrics",
    "best_metrics",
    "best",
    "best_metric",
    "best_mode",
    "epochs_without_best",  # part: early_stopping
)
"""Attributes of a run that its checkpoints hold."""

RESERVED_KEYS = {
    *("guard", "run", "format", "step", "rng", "config", "facts", "versions", "path"),
    *("weights", "shards"),
}
"""Keys of a checkpoint that are no parts of a script's state."""


class Run:
    """A training run: resumes, counts, logs and saves steps, skips bad ones, exits after a signal.

    Values stay on the device until a log point, every `log.every_steps` steps. Only rank 0 writes.

    Attributes:
        step_number: optimizer steps since the start of the run, over all resumes.
        precision: dtype that the model computes in.
        eval_model: model that is evaluated, whose best weights become `model.safetensors`.
    """

    def __init__(
        self,
        cfg: Config,
        device: torch.device,
        state: dict[str, Any],
        group: SingleProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make `cfg.output_dir` this run's folder.

        Args:
            cfg: configuration of the run.
            device: device of this process.
            state: parts by name that are saved and restored, before they are wrapped: every script
                then has the same keys. At least `model`, `optimizer`, `scheduler` and `loader`.
            group: processes of the run; default: this one.
            clock: function that returns a time in seconds.

        Raises:
            UserError: another run writes to the folder.
            ValueError: a part has a name of `RESERVED_KEYS`.
        """
        if reserved := sorted(RESERVED_KEYS & state.keys()):
            raise ValueError(f"state: {', '.join(reserved)} is reserved; use another name")
        self.cfg, self.device, self.group = cfg, device, group or SingleProcess()
        self.model, self.scheduler = state["model"], state["scheduler"]
        self.loader: Loader = state["loader"]
        self.guard = NonFiniteGuard(cfg, self.model, state["optimizer"], self.loader)
        self.state = {**state, "guard": self.guard, "run": self}
        self.precision = torch.float32
        self.eval_model: nn.Module = self.model
        self.is_last_micro_batch = True  # part: accumulate

        # Progress, which checkpoints hold
        self.step_number = self.num_epochs = 0
        self.validated_step = -1
        self.metrics: dict[str, float] = {}
        self.best_metrics: dict[str, float] = {}
        self.best = float("-inf")  # the higher, the better: of an error, its negative
        self.best_metric, self.best_mode = "", "max"
        self.epochs_without_best = 0  # part: early_stopping

        self.run_dir = Path(
            HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else cfg.output_dir
        )
        self.timing = Timing(device, clock)
        trace = self.run_dir / f"trace-rank{self.group.rank}.json.gz"  # part: profile
        self.profiler = profiler_of(cfg.profile.steps, trace)  # part: profile
        self.recorder = Recorder(cfg, self.loader, self.run_dir, self.group, self.timing, device)
        group = self.group
        group = group.for_writing(self.model)  # part: fsdp
        self.writer = CheckpointWriter(cfg.checkpoint, self.run_dir / "checkpoints", group)
        self.clock = clock
        self.last_save = clock()
        self.group.broadcast_from_rank0(lambda: acquire_run_dir(cfg, self.run_dir))
        preemption.listen()  # part: preemption

    def resume(self) -> None:
        """Load the checkpoint that `cfg.resume` names, or else initial weights, if any are named.

        Call it before the model is wrapped.

        Raises:
            UserError: no such file can be read, the checkpoint is of another model or other data,
                its plan differs, or no weight fits.
        """
        cfg = self.cfg
        # Rank 0 reads for all ranks, whose disks may differ.
        saved = self.group.broadcast_from_rank0(
            lambda: read_checkpoint(cfg.resume, self.run_dir / "checkpoints")
        )
        if saved is not None:
            try:
                restore(cfg, self.state, saved, self.group)
            except Exception as error:
                error.add_note(f"while loading {saved['path']}")
                raise
            self.step_number = self.loader.epoch * len(self.loader) + self.loader.batches_done
            log.info("resumed from %s: step %d", saved["path"], self.step_number)
        elif cfg.model.weights is not None:  # part: finetune
            start_from(cfg, self.model, self.loader, self.group)
        self.guard.keep_statistics()

    # The loop

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from 0, until the run has ended."""
        self.recorder.open_run(self.model, self.precision)
        if self.group.rank == 0:  # part: amp|ema|ranks
            self._warn_of_unused_settings()
        epochs = range(max(self.loader.epoch, self.num_epochs), self.cfg.epochs)
        lacks_validation = self._is_at_max_steps() and self.step_number != self.validated_step
        if not epochs or (self._has_ended() and not lacks_validation):
            limits = {"epochs": self.cfg.epochs, "max_steps": self.cfg.max_steps}
            patience = self.cfg.early_stopping.patience  # part: early_stopping
            limits["early_stopping.patience"] = patience  # part: early_stopping
            given = " ".join(f"{key}={limit}" for key, limit in limits.items() if limit is not None)
            log.info(
                "nothing to do: the run has ended after epoch %d (step %d); to train on, raise %s",
                *(self.num_epochs, self.step_number, given),
            )
            return
        if self.profiler is not None:  # part: profile
            self.profiler.start()
        for epoch in epochs:
            yield epoch
            if self._has_ended():
                break

    def batches(
        self,
        loader: Loader,
        num_micro_batches: int = 1,  # part: accumulate
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the training batches of the epoch until `max_steps`, and time each step.

        Each is yielded in `num_micro_batches` equal parts, one after the other.  # part: accumulate
        The wait for a batch is measured, too.
        """
        self.step_number = loader.epoch * len(loader) + loader.batches_done
        is_start = self.step_number == 0 and self.group.rank == 0  # part: accumulate
        if is_start and num_micro_batches != self.cfg.accumulate_steps:  # part: accumulate
            log.warning(
                "accumulate_steps=%d has no effect in this script", self.cfg.accumulate_steps
            )
        self.recorder.open_epoch(self.step_number)
        self.timing.lap("other")
        # An epoch that was stopped after its last step has only its validation left.
        batches = iter(()) if is_finished(loader) else iter(loader)
        while not self._is_at_max_steps():
            with self.timing.data_wait():
                batch = next(batches, None)
            if batch is None:
                break
            count = num_samples(batch)
            self.timing.count_images(count * self.group.world_size)
            self.recorder.lr = float(self.scheduler.get_last_lr()[0])
            # without accumulate: yield batch
            for number in range(num_micro_batches):  # part: accumulate
                size = count // num_micro_batches  # a divisor, see check_batch_size()
                self.is_last_micro_batch = number == num_micro_batches - 1
                yield part(batch, number * size, (number + 1) * size) if size < count else batch
            if self.step_number == 1:
                self.recorder.log_inputs(batch, self.step_number)
            self.timing.end_step()
            if self.profiler is not None:  # part: profile
                self.profiler.step()
                self.timing.lap("profile")
        self.recorder.close_epoch(self.step_number)
        self._act_on(self.group.pending_flags())

    def skip_if_not_finite(self, grad_norm: Tensor, scaler: GradScaler | None = None) -> None:
        """Make the following `optimizer.step()` change nothing if the norm is not finite.

        Args:
            grad_norm: L2 norm of all gradients, equal on all ranks.
            scaler: scaler of mixed precision; a step that it skips at a scale above 1 is not bad.
        """
        self.guard.check(grad_norm, scaler)

    def record_micro_batch(self, loss: Tensor) -> None:  # part: accumulate
        """Record the loss of a batch that does not end its step, divided by the number of parts."""
        self.recorder.add_loss(loss)

    def step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record one optimizer step; save if it is time to, and exit after a signal.

        All ranks do so at the same step; with several ranks, one step later.

        Args:
            loss: mean over this rank's batch.
            grad_norm: L2 norm of all gradients, before clipping.

        Raises:
            UserError: `max_bad_steps` steps in a row were bad, at a log point.
        """
        self.step_number += 1
        if self.step_number % self.cfg.log.every_steps == 0:
            self.guard.settle()  # here the recorder waits for the device anyway
        self.recorder.add_loss(loss)
        self.recorder.end_step(self.step_number, grad_norm)
        every_steps = self.cfg.checkpoint.every_steps
        is_step = every_steps is not None and self.step_number % every_steps == 0
        flags = [not is_step and self._is_time_to_save()]
        flags.append(preemption.is_requested())  # part: preemption
        self._act_on(self.group.any_rank(flags), is_step)

    def epoch(self, task: Task, totals: Tensor, shown: Shown = ()) -> None:
        """Record the validation after an epoch, and save.

        Args:
            task: turns the totals into metrics.
            totals: sums of `evaluate()` over the whole validation split.
            shown: inputs, outputs and targets of some samples, for pictures.
        """
        metrics = task.metrics(totals)
        self.metrics = {f"val/{name}": value for name, value in metrics.items()}
        self.best_metric, self.best_mode = f"val/{task.best_metric}", task.best_mode
        self.num_epochs = self.loader.epoch + is_finished(self.loader)
        self.validated_step = self.step_number
        self.recorder.log_pictures(task, totals, shown, self.step_number)  # part: pictures
        self.recorder.log_validation(self.metrics, self.step_number)
        self.timing.lap("validation")
        value = metrics[task.best_metric]
        self._save(-value if task.best_mode == "min" else value)

    def finish(self) -> None:
        """Wait for the last checkpoint, write `summary.json` if any step was made, log results."""
        self.best, self.best_metrics = self.writer.wait()
        if self.profiler is not None:  # part: profile
            self.profiler.stop()
        self.timing.end()
        results = {
            **self.metrics,
            "best": self.best_metrics,
            "best_metric": self.best_metric,
            "best_mode": self.best_mode,
            "steps": self.step_number,
            "bad_steps": self.guard.num_bad_steps,
        }
        self.recorder.close_run(results, self.best_metrics)

    def _is_at_max_steps(self) -> bool:
        return self.cfg.max_steps is not None and self.step_number >= self.cfg.max_steps

    def _has_ended(self) -> bool:
        """Return True at `max_steps`, and after too many epochs without a better one."""
        patience = self.cfg.early_stopping.patience  # part: early_stopping
        if patience is not None and self.epochs_without_best >= patience:  # part: early_stopping
            since = self.num_epochs - self.epochs_without_best
            log.info("early stopping: no better %s since epoch %d", self.best_metric, since)
            return True
        return self._is_at_max_steps()

    def _warn_of_unused_settings(self) -> None:  # part: amp|ema|ranks
        """Warn of settings of techniques that this script does not have."""
        is_used: dict[str, bool] = {}
        has_amp = self.precision is not torch.float32  # part: amp
        is_used["amp"] = has_amp or self.cfg.amp.dtype == "float32"  # part: amp
        is_used["ema"] = self.eval_model is not self.model  # part: ema
        is_used["distributed"] = type(self.group) is not SingleProcess  # part: ranks
        for group in [name for name in is_used if not is_used[name]]:
            config = getattr(self.cfg, group)
            for key, default in asdict(type(config)()).items():
                if (value := getattr(config, key)) != default:
                    log.warning("%s.%s=%s has no effect in this script", group, key, value)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run, besides the parts of `state`."""
        fields = {name: getattr(self, name) for name in CHECKPOINTED_FIELDS}
        fields |= {"epoch_is_finished": is_finished(self.loader)}
        return fields | {"sums": self.recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the progress that a checkpoint holds."""
        for name in CHECKPOINTED_FIELDS:
            if name in state:  # not in checkpoints of before the field was added
                setattr(self, name, state[name])
        self.recorder.load_state_dict(state.get("sums", {}))
        self.writer.best = self.best, self.best_metrics

    def _is_time_to_save(self) -> bool:
        """Return True once for each interval, by rank 0's clock; ranks may agree a step later."""
        minutes = self.cfg.checkpoint.every_minutes
        if self.group.rank != 0 or minutes is None:
            return False
        now = self.clock()
        if now - self.last_save < 60 * minutes:
            return False
        self.last_save = now
        return True

    def _act_on(self, flags: list[bool], is_step: bool = False) -> None:
        """Save and exit as the ranks have agreed.

        Args:
            flags: whether to save, and whether a rank was signalled; empty: not yet agreed.
            is_step: save in this step in any case.
        """
        if is_step or any(flags):
            self._save()
        if any(flags[1:]):  # part: preemption
            self._exit()

    def _exit(self) -> None:  # part: preemption
        """Exit with `preemption.EXIT_CODE` when the checkpoint is complete."""
        # torchrun ends all ranks as soon as one has left: not before the file is complete.
        self.writer.wait()
        if self.group.rank == 0:
            (self.run_dir / preemption.REQUEUE_MARKER).touch()
            log.warning(
                "stopped by a signal: saved at step %d; continue with output_dir=%s resume=auto",
                self.step_number,
                self.run_dir,
            )
        sys.exit(preemption.EXIT_CODE)

    def _save(self, value: float | None = None) -> None:
        """Save the current state.

        Every rank calls this. It waits for the previous write, copies what this rank writes to the
        host, and writes it in the background.

        Args:
            value: value of the task's best metric, higher is better; None without validation.
        """
        self.guard.settle()
        self.timing.finished()  # what follows, such as the wait for the previous write, is no step
        self.recorder.count_bad_samples()  # part: bad_samples
        # A checkpoint that could not be written is not the best one.
        self.best, self.best_metrics = self.writer.wait()
        is_better = value is not None and value > self.best
        if value is not None:  # part: early_stopping
            self.epochs_without_best = 0 if is_better else self.epochs_without_best + 1
        losses = [metrics.get("val/loss", 0.0) for metrics in (self.metrics, self.best_metrics)]
        is_best = is_better or (value == self.best and losses[0] < losses[1])
        if value is not None and is_best:
            self.best, self.best_metrics = value, self.metrics
        self.recorder.loggers.flush()  # the log reaches at least as far as the checkpoint
        state = {name: value.state_dict() for name, value in self.state.items()}
        if is_best and self.eval_model is not self.model:  # part: ema
            state["weights"] = self.eval_model.state_dict()
        state |= {
            "format": FORMAT,
            "step": self.step_number,
            "rng": self.group.gather(rng_state()),
            "config": settings(self.cfg),
            "facts": self.recorder.facts(),
            "versions": VERSIONS,
        }
        self.last_save = self.clock()
        self.writer.write(on_host(state, self.group.rank), is_best)
        self.timing.lap("saving")


def is_finished(loader: Loader) -> bool:
    """Return True if all batches of the epoch have been used."""
    return loader.batches_done >= len(loader)
