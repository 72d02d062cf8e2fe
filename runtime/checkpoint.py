"""Writing the checkpoints of a run, in the background: of the newest `checkpoint.keep` steps, and
of the best one, whose weights are in `model.safetensors` beside them."""

import json
import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.files import sync, write_atomically
from conf.schema import CheckpointConfig
from runtime.checkpoint_files import (
    BEST,
    BEST_WEIGHTS,
    FORMAT,
    MANIFEST,
    STATE,
    best_of,
    fingerprint,
    map_named,
    newest_first,
)
from runtime.process_group import ProcessGroup, is_sharded, local

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread; every rank calls its methods.

    Rank 0 empties a hidden folder, into which all ranks write. It adds the manifest of what they
    have written, and renames the folder: a checkpoint is there as a whole or not at all.
    """

    def __init__(
        self, options: CheckpointConfig, folder: Path, group: ProcessGroup | None = None
    ) -> None:
        """`group` are the ranks of the run, by default this process. No other messages may pass
        through it."""
        self.options, self.folder, self.group = options, folder, group or ProcessGroup()
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None

    def write(self, state: dict[str, Any], is_best: bool = False) -> None:
        """Copy a state to the host, and begin to write it; to be called after `wait()`.

        Args:
            state: nested values, equal on all ranks but for tensors that are sharded. `step` names
                the folder; `facts` are the metadata of the weights; of the best state, `weights`
                are published, if there are any, or else those of the `model`.
        """
        shards: dict[str, Tensor] = {}

        def copied(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if is_sharded(value):
                shards[name] = local(value).to("cpu", copy=True)
                return None
            return value.detach().to("cpu", copy=True) if self.group.rank == 0 else None

        copies, is_best = map_named(copied, state), is_best and self.options.best
        self.writing = self.thread.submit(self._write, copies, shards, is_best)

    def wait(self) -> None:
        """Wait until all ranks have written everything; raise OSError if one of them could not and
        `checkpoint.on_error` is `raise`."""
        error = self.writing.exception() if self.writing else None
        self.writing = None
        if error is not None and self.options.on_error == "raise":
            raise error
        if error is not None and self.group.rank == 0:
            log.warning("%s; training continues (checkpoint.on_error=warn)", error)

    def _write(self, state: dict[str, Any], shards: dict[str, Tensor], is_best: bool) -> None:
        path = self.folder / f"step-{state['step']:08d}"
        temporary = self.folder / f".{path.name}.tmp"
        try:
            self.group.broadcast_from_rank0(lambda: self._make_empty(temporary))
            ranks = self.group.gather(self._write_files(temporary, state, shards, is_best))
            self.group.broadcast_from_rank0(lambda: self._finish(path, temporary, ranks))
        except Exception as error:
            if self.group.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = str(error).partition("\n")[0] or repr(error)
            raise OSError(
                f"{path} could not be written ({reason}); earlier checkpoints are untouched"
            ) from error

    def _make_empty(self, temporary: Path) -> None:
        """Make the folder that all ranks write to; remove those of writes that were killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for dead in self.folder.glob(".*.tmp"):
            shutil.rmtree(dead, ignore_errors=True)  # NFS keeps files that are open
        temporary.mkdir()

    def _write_files(
        self, folder: Path, state: dict[str, Any], shards: dict[str, Tensor], is_best: bool
    ) -> dict[str, str] | OSError:
        """Write this rank's files; return their fingerprints by name, or what was in the way."""
        names = [f"shard-{rank:05d}.pt" for rank in range(self.group.world_size)] if shards else []
        contents: dict[str, Any] = {names[self.group.rank]: shards} if shards else {}
        weights = None  # those of a sharded model stay in its checkpoint
        if self.group.rank == 0:
            if is_best and not shards:
                weights = state.pop("weights", state.get("model"))
            contents[STATE] = state | {"shards": names}
        try:
            for name, content in contents.items():
                # By a path, torch.save would hold Python's lock for longer, and hide a full disk.
                with (folder / name).open("wb") as file:
                    torch.save(content, file)
                    os.fsync(file.fileno())
            if self.group.rank == 0 and is_best:
                (folder / BEST).touch()
                self._publish(weights, state["facts"])
            return {name: fingerprint(folder / name) for name in contents}
        except Exception as error:  # torch.save raises one of its own after that of the disk
            reason = error if isinstance(error, OSError) else error.__context__ or error
            return OSError(f"rank {self.group.rank}: {reason}")

    def _publish(self, weights: dict[str, Tensor] | None, facts: dict[str, Any]) -> None:
        """Replace the weights of the best state; None: they are in its checkpoint."""
        path = self.folder / BEST_WEIGHTS
        if weights is None:
            path.unlink(missing_ok=True)
            return
        # One key: safetensors writes several in another order each time, and files would differ.
        metadata = {"facts": json.dumps(facts)}
        with write_atomically(path) as file:
            save_file({name: x.contiguous() for name, x in weights.items()}, file, metadata)

    def _finish(self, path: Path, temporary: Path, ranks: list[Any]) -> None:
        """Give the folder that all have written to its name; remove those not to be kept."""
        files: dict[str, str] = {}
        for written in ranks:
            if isinstance(written, OSError):
                raise written
            files |= written
        if any(not (temporary / name).exists() for name in files):
            raise OSError("rank 0 does not see what others wrote: use a folder that all share")
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
        sync(manifest)
        sync(temporary)
        if path.exists():  # an earlier attempt's, or of this step before its validation
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        temporary.rename(path)
        sync(self.folder)
        found = newest_first(self.folder)
        # Later steps are of an earlier attempt: the run has resumed before them.
        own = [each for each in found[found.index(path) :] if not each.name.startswith(".")]
        for each in found:
            if each not in own[: self.options.keep] and each != best_of(own):
                dead = each.rename(each.with_name(f".{each.name.lstrip('.')}.tmp"))
                shutil.rmtree(dead, ignore_errors=True)  # the next write tries again
