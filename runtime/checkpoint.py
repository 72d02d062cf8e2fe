"""Checkpoint files: verified when read, written in the background and replaced as a whole.

`<run>/checkpoints/step-00000123.pt`, the newest `checkpoint.keep` of them; `last.pt` and `best.pt`
are links to two of them, and `model.safetensors` holds the weights of the best one. Its metadata
`facts` is JSON of what a user of the model needs, such as the names of the classes.
"""

import json
import logging
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from conf.files import sync_folder, write_atomically
from conf.schema import CheckpointConfig
from loaders.batch import tensors_of
from models.pretrained import load_tensors
from runtime.group import SingleProcess
from runtime.shards import check_shards, remove_shards, write_shards

log = logging.getLogger(__name__)

CHECKPOINT_FORMAT = 1
"""Version of the checkpoints; to be raised with each change that older ones do not fit."""

RESERVED_KEYS = {
    *("guard", "run", "format", "step", "rng", "config", "facts", "versions", "path"),
    *("weights", "shards"),
}
"""Keys of a checkpoint that a script's state cannot have."""

WHAT_TO_GIVE = "give the folder of a run, one of its checkpoints/step-*.pt, or auto"


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread; every rank calls its methods.

    Each rank writes its shards, if there are any, and then rank 0 the files.
    """

    def __init__(
        self,
        options: CheckpointConfig,
        folder: Path,
        group: SingleProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to a folder; `group` are the ranks of the run, by default this process."""
        self.options, self.folder, self.group = options, folder, group or SingleProcess()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None  # of rank 0's last write
        self.clock, self.last_write = clock, clock()

    def is_time(self) -> bool:
        """Return True once for each `every_minutes`, by rank 0's clock."""
        minutes = self.options.every_minutes
        if self.group.rank != 0 or minutes is None:
            return False
        now = self.clock()
        if now - self.last_write < 60 * minutes:
            return False
        self.last_write = now  # other ranks may agree to write a step later
        return True

    def write(self, state: dict[str, Any], is_best: bool = False) -> None:
        """Begin to write a state, after `wait()`.

        Args:
            state: tensors on the host. `state["step"]` names the file; `state["facts"]` are the
                metadata of the weights. Unless they are in shards, `state["weights"]` are
                published, or else the model's.
            is_best: True if this state is the best so far.
        """
        self.last_write = self.clock()
        state = state | {"format": CHECKPOINT_FORMAT}
        self.thread = threading.Thread(target=self._write, args=(state, is_best))
        self.thread.start()

    def wait(self) -> None:
        """Wait until all ranks have written everything.

        Raises:
            OSError: the last state could not be written, and `checkpoint.on_error` is `raise`.
        """
        if self.thread is not None:
            self.thread.join()
            self.group.broadcast_from_rank0(self._report)

    def _report(self) -> None:
        error, self.error = self.error, None
        if error is not None and self.options.on_error == "raise":
            raise error
        if error is not None:
            log.warning("%s; training continues (checkpoint.on_error=warn)", error)

    def _write(self, state: dict[str, Any], is_best: bool) -> None:
        path = self.folder / f"step-{state['step']:08d}.pt"
        try:
            state = write_shards(state, self.folder, self.group)
            if self.group.rank == 0:
                self._write_files(path, state, is_best and self.options.best)
        except Exception as error:
            reason = str(error).partition("\n")[0] or repr(error)
            needed = sum(tensor.nbytes for tensor in tensors_of(state))
            room = f"about {needed / 1e6:.1f} MB needed"
            with suppress(OSError):  # where the folder is gone
                room += f", {shutil.disk_usage(self.folder.parent).free / 1e6:.1f} MB free"
            if self.group.rank == 0:
                with suppress(OSError):
                    remove_shards(self.folder)  # of this write
            self.error = OSError(
                f"{path} could not be written ({reason}): {room}; earlier checkpoints are untouched"
            )

    def _write_files(self, path: Path, state: dict[str, Any], is_best: bool) -> None:
        """Write a checkpoint and, of the best one, its weights; remove those not to be kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob(".*"):  # of a run that was killed
            if file.suffix in (".pt", ".safetensors"):
                file.unlink()
        published = self.folder / "model.safetensors"
        weights = None if "shards" in state else state.pop("weights", state.get("model"))
        with write_atomically(path) as file:
            torch.save(state, file)
            if is_best and weights is not None:
                with write_atomically(published) as other:
                    publish(weights, state["facts"], other)
        link(path, self.folder / "last.pt")
        if is_best:
            link(path, self.folder / "best.pt")
        if is_best and weights is None:
            published.unlink(missing_ok=True)  # of an earlier best state
        files = newest_first(self.folder)
        place = files.index(path)
        # Later steps are of an earlier attempt: the run has resumed before them.
        for old in files[:place] + files[place + self.options.keep :]:
            old.unlink()
        if "shards" in state:
            remove_shards(self.folder)


def read_checkpoint(resume: str | None, folder: Path) -> dict[str, Any] | None:
    """Read the newest undamaged checkpoint that `resume` names, with its `path`; `folder` has the
    run's own.

    Returns:
        None if there is nothing to resume. Another run's checkpoint comes without its best metrics:
        the weights that reached them are in that run's folder.

    Raises:
        UserError: `resume` names no checkpoint, only damaged ones, or one of another version.
    """
    if resume is None:
        return None
    path = folder if resume == "auto" else Path(resume)
    if resume != "auto" and newest_first(folder):
        log.info("resuming in %s and not from resume=%s: this run was started before", folder, path)
        path = folder  # a restart repeats the command
    files = [path] if path.is_file() else newest_first(path) or newest_first(path / "checkpoints")
    if not files and resume == "auto":
        log.info("resume=auto: no checkpoint in %s, starting a fresh run", folder)
        return None
    for file in files:
        try:
            damage = zipfile.ZipFile(file).testzip()  # torch.load would not see flipped bytes
            if damage is not None:
                raise ValueError(f"wrong checksum of {damage}")
            state = load_tensors(file)
            check_shards(state, file.parent)
        except Exception as error:  # damaged bytes raise errors of any type
            reason = str(error).partition("\n")[0][:200]
            log.warning("%s is damaged or not a checkpoint (%s)", file, reason)
            continue
        if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
            raise UserError(
                f"resume={resume}: {file} is not a checkpoint of this version; {WHAT_TO_GIVE}, "
                f"or start another run from the weights in {file}"
            )
        if file.parent.resolve() != folder.resolve():
            state["run"] |= {"best": float("-inf"), "best_metrics": {}}
        return state | {"path": str(file)}
    raise UserError(
        f"resume={resume}: there is no checkpoint that can be read ({len(files)} found); "
        f"{WHAT_TO_GIVE}"
    )


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def publish(weights: dict[str, Tensor], facts: dict[str, Any], file: Path) -> None:
    """Write weights as safetensors with facts about their data as metadata."""
    # One key: safetensors writes several in another order each time, and files would differ.
    metadata = {"facts": json.dumps(facts)}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata)


def link(path: Path, name: Path) -> None:
    """Replace `name` by a link to `path`, or by a copy on a file system without links."""
    temporary = name.with_name(f".{name.name}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    temporary.replace(name)
    sync_folder(name.parent)
