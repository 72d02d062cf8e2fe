"""Checkpoints: complete, written by one rank, never half-written, readable by every entry point."""

import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loaders import Loader
from runtime.logger import run_folder

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)


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
        scaler: GradScaler | None = None,
        rank: int = 0,
    ) -> None:
        self.cfg, self.rank = cfg, rank
        self.folder = run_folder(cfg) / "checkpoints"
        self.train_loader = train_loader
        self.parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": train_loader,
        }
        if scaler is not None:
            self.parts["scaler"] = scaler
        self.best = float("-inf")

    def save(self, value: float) -> None:
        """Write `last.pt` and, if `value` (higher is better) is the highest so far, `best.pt`.

        Every rank calls this; rank 0 writes.
        """
        is_best = value > self.best
        self.best = max(self.best, value)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["best"] = self.best
        state["rng"] = _gather(_rng_state())
        state["config"] = OmegaConf.to_container(self.cfg, resolve=True)
        state["versions"] = {"torch": str(torch.__version__), "python": platform.python_version()}
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(state, self.folder / "last.pt")
            if is_best and self.cfg.checkpoint.best:
                write_atomically(state, self.folder / "best.pt")

    def resume(self) -> int:
        """Load what `cfg.resume` names, if anything.

        Returns:
            The epoch to go on with.

        Raises:
            FileNotFoundError: `cfg.resume` is a path and nothing is there.
            ValueError: the checkpoint is of another model.
        """
        path = self._path()
        if path is None:
            return 0
        state = torch.load(path, map_location="cpu", weights_only=True)
        try:
            self.parts["model"].load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(
                f"{path} holds another model than model={self.cfg.model.name} "
                f"({str(error).splitlines()[-1].strip()}); resume with the configuration of its run: "
                f"{state['config']['model']}"
            ) from error
        for name, part in self.parts.items():
            if name == "model":
                continue
            if state.get(name):
                part.load_state_dict(state[name])
            else:
                log.warning("%s holds no %s state: the %s starts fresh", path, name, name)
        self.best = state["best"]
        if self.rank < len(state["rng"]):
            _set_rng_state(state["rng"][self.rank])
        start_epoch = self.train_loader.epoch + self.train_loader.epoch_is_finished
        log.info("resumed from %s: epoch %d of %d", path, start_epoch + 1, self.cfg.epochs)
        return start_epoch

    def _path(self) -> Path | None:
        if self.cfg.resume is None:
            return None
        if self.cfg.resume == "auto":
            last = self.folder / "last.pt"
            if last.exists():
                return last
            log.info("resume=auto: no checkpoint in %s, starting anew", self.folder)
            return None
        path = Path(self.cfg.resume)
        if path.is_dir():
            path = path / "checkpoints" / "last.pt"
        if not path.is_file():
            raise FileNotFoundError(
                f"resume={self.cfg.resume}: {path} is no file; give a checkpoint, the folder of a "
                "run, or auto"
            )
        return path


def write_atomically(state: dict[str, Any], path: Path) -> None:
    """Write `state` to `path` so that a crash leaves either the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _gather(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The state of every rank, in their order."""
    if not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states
