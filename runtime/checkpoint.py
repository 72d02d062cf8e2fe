"""Checkpoint files: verified when read, written in the background and replaced as a whole.

`<run>/checkpoints/step-00000123.pt`, the newest `checkpoint.keep` of them; `last.pt` and `best.pt` are
links to two of them, and `model.safetensors` holds the weights of the best one for publishing, with the
names of the classes and what else a user of the model has to know as metadata.
"""

import json
import logging
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.state import tensors_in

if TYPE_CHECKING:
    from conf.schema import CheckpointConfig

log = logging.getLogger(__name__)


PARTS = {"model", "optimizer", "scheduler", "loader", "run", "rng", "config"}
"""What every checkpoint has."""

WHAT_TO_GIVE = "give a run's folder, one of its checkpoints/step-*.pt, or auto"


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of its own."""

    def __init__(self, options: "CheckpointConfig", folder: Path) -> None:
        self.options, self.folder = options, folder
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def write(self, state: dict[str, Any], best_weights: dict[str, Tensor] | None = None) -> None:
        """Begin to write a state on the host, once an earlier one is written.

        Args:
            state: `state["step"]` names the file; `state["facts"]` are the metadata of the weights.
            best_weights: if the state is the best so far, the weights to be published.

        Raises:
            OSError: the earlier one could not be written, and `checkpoint.on_error` is `raise`.
        """
        self.wait()
        self.thread = threading.Thread(target=self._write, args=(state, best_weights))
        self.thread.start()

    def wait(self) -> None:
        """Until everything is written; raises as `write()`."""
        if self.thread is not None:
            self.thread.join()
        error, self.error = self.error, None
        if error is not None and self.options.on_error == "raise":
            raise error
        if error is not None:
            log.warning("%s; training goes on (checkpoint.on_error=warn)", error)

    def _write(self, state: dict[str, Any], best_weights: dict[str, Tensor] | None) -> None:
        path = self.folder / f"step-{state['step']:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for pattern in (".*.pt.*", ".*.safetensors.*"):
                for unfinished in self.folder.glob(pattern):  # of a run that was killed
                    unfinished.unlink()
            write_atomically(path, lambda temporary: torch.save(state, temporary))
            _link(path, self.folder / "last.pt")
            if best_weights is not None and self.options.best:
                _link(path, self.folder / "best.pt")
                metadata = {key: json.dumps(fact) for key, fact in state["facts"].items()}
                weights = {name: tensor.contiguous() for name, tensor in best_weights.items()}
                write_atomically(
                    self.folder / "model.safetensors",
                    lambda temporary: save_file(weights, temporary, metadata),
                )
            # A later step is of what this run has left: it went on from an earlier checkpoint.
            files = newest_first(self.folder)
            place = files.index(path)
            for old in files[:place] + files[place + max(1, self.options.keep) :]:
                old.unlink()
        except Exception as error:
            reason = str(error).partition("\n")[0] or repr(error)
            needed = sum(tensor.nbytes for tensor in tensors_in(state))
            room = f"about {needed / 1e6:.1f} MB needed"
            with suppress(OSError):  # where the folder is gone
                room += f", {shutil.disk_usage(self.folder.parent).free / 1e6:.1f} MB free"
            self.error = OSError(
                f"{path} could not be written ({reason}): {room}; earlier checkpoints are untouched"
            )


def read_checkpoint(resume: str | None, folder: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint that `resume` names, with its `path`.

    Args:
        resume: as in the configuration.
        folder: where the run's own checkpoints lie.

    Returns:
        None if there is nothing to resume. Of another run's checkpoint, what was best is left out: the
        weights that reached it lie there.

    Raises:
        FileNotFoundError: `resume` is a path and no checkpoint is there.
        ValueError: all of them are damaged, or the file is none.
    """
    if resume is None:
        return None
    path = folder if resume == "auto" else Path(resume)
    if resume != "auto" and newest_first(folder):
        log.info("not resume=%s, but where this run was: it was started before", path)
        path = folder  # a restart repeats the command
    if path.is_file():
        candidates = [path]
    else:
        candidates = newest_first(path) or newest_first(path / "checkpoints")
    if not candidates and resume == "auto":
        log.info("resume=auto: no checkpoint in %s, starting anew", folder)
        return None
    if not candidates:
        raise FileNotFoundError(
            f"resume={resume}: there is no checkpoint; give a checkpoint file, the folder of a run, or auto"
        )
    for candidate in candidates:
        if not zipfile.is_zipfile(candidate) and candidate == path:
            raise ValueError(f"resume={resume} {_what_it_is(path)}; {WHAT_TO_GIVE}")
        try:
            damage = zipfile.ZipFile(candidate).testzip()  # torch.load would not see flipped bytes
            if damage is not None:
                raise ValueError(f"wrong checksum of {damage}")
            state = torch.load(candidate, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).partition("\n")[0][:200]
            log.warning("%s is damaged (%s): trying the one before it", candidate, reason)
            continue
        if not isinstance(state, dict) or not PARTS <= state.keys():
            raise ValueError(f"resume={resume} {_what_it_is(candidate, state)}; {WHAT_TO_GIVE}")
        if candidate.parent.resolve() != folder.resolve():
            state["run"] |= {"best": float("-inf"), "best_metrics": {}}
        return state | {"path": str(candidate)}
    raise ValueError(f"resume={resume}: all {len(candidates)} checkpoints are damaged")


def _what_it_is(path: Path, content: Any = None) -> str:
    """What a file that is no checkpoint is instead, as far as it shows."""
    if path.suffix == ".safetensors" or (
        isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values())
    ):
        return "holds weights alone, without optimizer and position"
    if content is None and path.suffix == ".pt" and path.name.startswith(("step-", "last", "best")):
        return "is a damaged checkpoint"
    return "is no checkpoint of a run"


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)


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
