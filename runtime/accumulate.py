"""Micro-batches: their number, and the exchange of gradients once per optimizer step."""

import copy
import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conf.errors import MEMORY, ONE_SAMPLE, UserError, cause_of, counted
from loaders.batch import num_samples, part
from runtime.process_group import is_sharded
from runtime.run import Run
from tasks import Task

log = logging.getLogger(__name__)


class MicroBatches:
    """Parts of a batch, of equal size, which pass through the model one after another: `number` of
    them, 0 until `accumulate_steps=auto` has found it. With the last one, `is_last` is True."""

    def __init__(self, run: Run, model: nn.Module, task: Task) -> None:
        """Take the number that is configured or that a checkpoint has for `auto`, of this script,
        share of a batch and kind of GPU."""
        self.run, self.model, self.task = run, model, task
        self.is_last = True
        self.share = run.cfg.global_batch_size // run.group.world_size
        if run.cfg.accumulate_steps != "auto":
            self.number = run.cfg.accumulate_steps
            return
        # FSDP's ranks compute together and cannot try alone.
        if any(map(is_sharded, model.parameters())):
            raise UserError(
                "accumulate_steps=auto does not work with FSDP; give a number, such as 4"
            )
        gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu"
        place = f"{Path(sys.argv[0]).name}: {self.share} samples on {gpu}"
        self.place = run.group.broadcast_from_rank0(lambda: place)
        self.number = run.progress.micro_batches.get(self.place, 0)

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the parts of batches; every rank finds a number that is not known yet."""
        for batch in batches:
            if self.number == 0:
                self.number = self._find(batch)
                self.run.progress.micro_batches[self.place] = self.number
            if self.number == 1:  # whole, also if its values have no common first dimension
                yield batch
                continue
            size = num_samples(batch) // self.number  # a divisor, see check_batch_size()
            for place in range(self.number):
                self.is_last = place == self.number - 1
                yield part(batch, place * size, (place + 1) * size)

    def _find(self, batch: Any) -> int:
        """Return the smallest number of parts that fit into the memory of every rank."""
        run, share = self.run, self.share
        for number in range(1, share + 1):
            if share % number:
                continue
            fits = run.group.gather(self._fits(part(batch, 0, share // number)))
            if all(fits):
                size = f"{share // number} of {counted(share, 'sample')} a rank"
                whole = f"global_batch_size={run.cfg.global_batch_size}"
                parts = f"{counted(number, 'part')} with {size} ({whole})"
                log.info("accumulate_steps=auto: %s", parts)
                return number
            log.info("accumulate_steps=%d does not fit on rank %d", number, fits.index(False))
        raise UserError(
            f"accumulate_steps=auto: the smallest parts of a batch do not fit into the memory of "
            f"{run.device}, with accumulate_margin={run.cfg.accumulate_margin}; a smaller "
            "data.crop, train_recompute.py, train_amp.py and train_fsdp.py need less"
        )

    def _fits(self, batch: Any) -> bool:
        """Return True if this rank's memory holds a part of a batch in forward and backward: of a
        copy of the model, so that nothing of the run changes, its random numbers included."""
        device = self.run.device
        with torch.random.fork_rng([device] * (device.type == "cuda")):
            try:
                self._try(batch)
            except Exception as error:
                cause = cause_of(error) or ""
                if not cause.endswith((MEMORY, ONE_SAMPLE)):  # BatchNorm needs two samples
                    raise
                return False
            finally:
                gc.collect()
                torch.cuda.empty_cache()
        return True

    def _try(self, batch: Any) -> None:
        """Compute two times forward and backward, the second one beside the gradients of the first,
        what the optimizer will hold, and the margin."""
        run, (inputs, targets) = self.run, batch
        model: Any = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        model = copy.deepcopy(model)
        for layer in model.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.eval()  # it would exchange its sums
        # AdamW will hold two numbers for each weight; the copy's weights are there for one of them.
        parameters = list(model.parameters())
        missing = 2 * sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        missing -= sum(parameter.nbytes for parameter in parameters)
        if missing < 0 or run.state["optimizer"].state:
            missing = 0
        if run.device.type == "cuda":
            missing += int(run.cfg.accumulate_margin * torch.cuda.mem_get_info(run.device)[1])
        reserved = torch.empty(missing, dtype=torch.uint8, device=run.device)
        is_low = run.precision is not torch.float32
        for _ in range(2):
            with torch.autocast(run.device.type, run.precision, enabled=is_low):
                outputs = model(inputs)
            self.task.loss(outputs, targets).backward()
        del reserved


def set_gradient_sync(model: Any, syncs: bool) -> None:
    """Choose if the next backward of DDP or FSDP exchanges gradients; before its forward."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif any(map(is_sharded, model.parameters())):
        model.set_requires_gradient_sync(syncs)
