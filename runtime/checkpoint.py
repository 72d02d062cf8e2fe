"""Checkpoints: complete, verified, written in the background, readable by every entry point.

`<run>/checkpoints/step-00000123.pt`, the newest `checkpoint.keep` of them; `last.pt` and `best.pt` are
links to two of them, and `model.safetensors` holds the weights of the best one for publishing.
"""

import logging
import os
import platform
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loaders import Loader
from runtime import preemption
from runtime.guard import NonFiniteGuard
from runtime.logger import RunLogger, run_folder

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the run's folder while the run wants to be started again."""


class Checkpoint:
    """Saves and restores all that a run consists of.

    Hand over the bare model, before it is wrapped: then the keys are the same in every entry point.
    """

    def __init__(
        self,
        cfg: "Config",
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        train_loader: Loader,
        guard: NonFiniteGuard,
        logger: RunLogger,
        scaler: GradScaler | None = None,
        rank: int = 0,
    ) -> None:
        self.cfg, self.rank = cfg, rank
        self.config = OmegaConf.to_container(cfg, resolve=True)
        # Looked up in each step, where a lookup in the configuration would take time.
        self.every_steps = cfg.checkpoint.every_steps
        self.every_minutes = cfg.checkpoint.every_minutes
        self.run_folder = run_folder(cfg)
        self.folder = self.run_folder / "checkpoints"
        self.train_loader, self.guard, self.logger = train_loader, guard, logger
        self.parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": train_loader,
            "guard": guard,
            "logger": logger,
        }
        if scaler is not None:
            self.parts["scaler"] = scaler
        self.best = float("-inf")
        self.writer: threading.Thread | None = None
        self.write_error: Exception | None = None
        self.last_save = time.monotonic()
        preemption.listen()

    def step(self) -> None:
        """To be called after each step: saves if it is time to, leaves if the run was asked to.

        All ranks save or leave at the same step, whichever of them a signal or the clock reached.

        Raises:
            SystemExit: with `preemption.EXIT_CODE`, after saving.
        """
        minutes = (time.monotonic() - self.last_save) / 60
        is_time = self.every_minutes is not None and minutes >= self.every_minutes
        leave = preemption.is_requested()
        if dist.is_initialized():
            wishes = torch.tensor([leave, is_time], dtype=torch.int32)
            dist.all_reduce(wishes, dist.ReduceOp.MAX)
            leave, is_time = (bool(wish) for wish in wishes)
        step = self.logger.step_number
        if leave or is_time or (self.every_steps and step % self.every_steps == 0):
            self.save()
        if leave:
            self.close()
            if dist.is_initialized():
                # torchrun ends all ranks as soon as one has left: not before the file is whole.
                dist.barrier()
            if self.rank == 0:
                (self.run_folder / REQUEUE_MARKER).touch()
                log.warning(
                    "asked to leave: saved at step %d; go on with output_dir=%s resume=auto",
                    step,
                    self.run_folder,
                )
            sys.exit(preemption.EXIT_CODE)

    def save(self, value: float | None = None) -> None:
        """Save the state as it is now; `value` (higher is better) may make it the best one.

        Every rank calls this. Rank 0 copies the state to the host and writes in the background, after
        an earlier write has ended.
        """
        self.guard.settle()
        self.logger.lap("compute")
        is_best = value is not None and value > self.best
        self.best = max(self.best, value if value is not None else float("-inf"))
        rng = _gather(_rng_state())
        self.last_save = time.monotonic()
        if self.rank != 0:
            self.logger.lap("saving")
            return
        self._wait()
        state = {name: _on_host(part.state_dict()) for name, part in self.parts.items()}
        state["step"], state["best"], state["rng"] = self.logger.step_number, self.best, rng
        state["config"] = self.config
        state["versions"] = {"torch": str(torch.__version__), "python": platform.python_version()}
        self.writer = threading.Thread(target=self._write, args=(state, is_best))
        self.writer.start()
        self.logger.lap("saving")

    def close(self) -> None:
        """Wait until everything is written."""
        self._wait()
        if self.rank == 0:
            (self.run_folder / REQUEUE_MARKER).unlink(missing_ok=True)

    def _wait(self) -> None:
        if self.writer is not None:
            self.writer.join()
        error, self.write_error = self.write_error, None
        if error is not None and self.cfg.checkpoint.on_error == "raise":
            raise error
        if error is not None:
            log.warning("%s; training goes on (checkpoint.on_error=warn)", error)

    def _write(self, state: dict[str, Any], is_best: bool) -> None:
        path = self.folder / f"step-{state['step']:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob(".*.pt.*"):  # of a run that was killed
                unfinished.unlink()
            write_atomically(path, lambda temporary: torch.save(state, temporary))
            _link(path, self.folder / "last.pt")
            if is_best and self.cfg.checkpoint.best:
                _link(path, self.folder / "best.pt")
                weights = {name: tensor.contiguous() for name, tensor in state["model"].items()}
                write_atomically(
                    self.folder / "model.safetensors",
                    lambda temporary: save_file(weights, temporary),
                )
            for old in _newest_first(self.folder)[max(1, self.cfg.checkpoint.keep) :]:
                old.unlink()
        except Exception as error:
            needed = sum(tensor.nbytes for tensor in _tensors(state))
            free = shutil.disk_usage(self.run_folder).free
            self.write_error = OSError(
                f"{path} could not be written ({str(error).splitlines()[0]}): about {needed / 1e6:.1f} MB "
                f"needed, {free / 1e6:.1f} MB free; earlier checkpoints are untouched"
            )

    def resume(self) -> int:
        """Load what `cfg.resume` names, if anything.

        Returns:
            The epoch to go on with.

        Raises:
            FileNotFoundError: `cfg.resume` is a path and nothing is there.
            ValueError: no checkpoint can be read, it is of another model, or its plan differs.
        """
        # Rank 0 reads for all: they go on from the same file also where disks are not shared.
        state = _from_rank_0(self._read, self.rank)
        if state is None:
            return 0
        try:
            self.parts["model"].load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(
                f"{state['path']} holds another model than model={self.cfg.model.name} "
                f"({str(error).splitlines()[-1].strip()}); resume with the configuration of its run: "
                f"{state['config']['model']}"
            ) from error
        self._check_plan(state)
        for name, part in self.parts.items():
            if name == "model":
                continue
            if state.get(name):
                part.load_state_dict(state[name])
            else:
                log.warning("%s holds no %s state: the %s starts fresh", state["path"], name, name)
        self.guard.start_from_here()
        self.best = state["best"]
        if self.rank < len(state["rng"]):
            _set_rng_state(state["rng"][self.rank])
        start_epoch = self.train_loader.epoch + self.train_loader.epoch_is_finished
        log.info(
            "resumed from %s: step %d, epoch %d of %d",
            state["path"],
            state["step"],
            start_epoch + 1,
            self.cfg.epochs,
        )
        return start_epoch

    def _check_plan(self, state: dict[str, Any]) -> None:
        then, now = state["loader"]["plan"], self.train_loader.state_dict()["plan"]
        differing = [
            f"{key}: {then.get(key)} then, {now[key]} now"
            for key in now
            if then.get(key) != now[key]
        ]
        if not differing:
            return
        if not self.cfg.checkpoint.fresh_epoch:
            raise ValueError(
                f"{state['path']} was made with another plan of the data ({'; '.join(differing)}); go "
                "back to that, or set checkpoint.fresh_epoch=true to start its epoch anew with this plan"
            )
        log.warning("another plan of the data: epoch %d starts anew", state["loader"]["epoch"] + 1)
        state["loader"] = {"epoch": state["loader"]["epoch"], "position": 0, "plan": now}

    def _read(self) -> dict[str, Any] | None:
        """The newest whole checkpoint that `cfg.resume` names; None if there is nothing to resume."""
        if self.cfg.resume is None:
            return None
        path = self.folder if self.cfg.resume == "auto" else Path(self.cfg.resume)
        if self.cfg.resume != "auto" and _newest_first(self.folder):
            log.info("not resume=%s, but where this run was: it was started before", path)
            path = self.folder  # a restart repeats the command
        if path.is_file():
            candidates = [path]
        else:
            candidates = _newest_first(path) or _newest_first(path / "checkpoints")
        if not candidates and self.cfg.resume == "auto":
            log.info("resume=auto: no checkpoint in %s, starting anew", self.folder)
            return None
        if not candidates:
            raise FileNotFoundError(
                f"resume={self.cfg.resume}: there is no checkpoint; give a checkpoint file, the folder "
                "of a run, or auto"
            )
        for candidate in candidates:
            try:
                damage = zipfile.ZipFile(
                    candidate
                ).testzip()  # torch.load would not see flipped bytes
                if damage is not None:
                    raise ValueError(f"wrong checksum of {damage}")
                return torch.load(candidate, map_location="cpu", weights_only=True) | {
                    "path": str(candidate)
                }
            except Exception as error:
                log.warning("%s is damaged (%s): trying the one before it", candidate, error)
        raise ValueError(f"resume={self.cfg.resume}: all {len(candidates)} checkpoints are damaged")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary file and rename it to `path`.

    After a crash there is either the old file or the new one, whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _link(path: Path, name: Path) -> None:
    """Let `name` be the same file as `path`, at once."""
    temporary = name.with_name(f".{name.name}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(path, temporary)
    temporary.replace(name)
    _sync_folder(name.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)


def _on_host(state: Any) -> Any:
    """A copy that training does not change any more."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_host(value) for value in state)
    return state


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in _tensors(value)]
    return [state] if isinstance(state, Tensor) else []


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _gather(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The state of every rank, in their order."""
    if not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def _from_rank_0(read: Callable[[], Any], rank: int) -> Any:
    """What `read` returns or raises on rank 0, on every rank."""
    if not dist.is_initialized():
        return read()
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = read()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
