"""Steps whose gradients are not finite change nothing."""

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from loaders import Loader

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

NAMED_FILES = 8


class NonFiniteGuard:
    """Skips steps with a non-finite gradient norm, without waiting for the device in each step.

    The norm is that of the gradients averaged over all ranks, so all ranks decide alike. The optimizer
    itself skips the step (fused optimizers look at `found_inf`, as GradScaler uses it), and the running
    statistics of BatchNorm become those from before it, also on the device: the outcome does not depend
    on when somebody looks. That happens every `log.every_steps` steps and in `settle()`.

    Attributes:
        num_bad_steps: skipped so far.
    """

    def __init__(
        self, cfg: "Config", model: nn.Module, optimizer: Optimizer, train_loader: Loader
    ) -> None:
        self.optimizer, self.train_loader = optimizer, train_loader
        self.max_bad_steps, self.every_steps = cfg.max_bad_steps, cfg.log.every_steps
        self.num_bad_steps = 0
        self.bad_in_a_row = 0
        # Of each step the norm, the epoch, the number of its batches so far, and the rows.
        self.unchecked: list[tuple[Tensor, int, int, np.ndarray]] = []
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        dtypes = dict.fromkeys(buffer.dtype for buffer in buffers)
        self.statistics = [Kept([b for b in buffers if b.dtype == dtype]) for dtype in dtypes]

    def state_dict(self) -> dict[str, int]:
        return {"num_bad_steps": self.num_bad_steps, "bad_in_a_row": self.bad_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_bad_steps, self.bad_in_a_row = state["num_bad_steps"], state["bad_in_a_row"]

    def check(self, grad_norm: Tensor) -> None:
        """To be called before `optimizer.step()` with the norm of all gradients.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad.
        """
        self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if grad_norm.is_cpu and math.isfinite(grad_norm):  # nobody waits for a CPU's answer
            self.start_from_here()
        else:
            found_inf = (grad_norm - grad_norm).nan_to_num_(nan=1.0)  # 0 if it is finite, else 1
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            is_bad = found_inf.bool()
            for statistics in self.statistics:
                statistics.restore_if(is_bad)
        loader = self.train_loader
        self.unchecked.append((grad_norm, loader.epoch, loader.batches_done, loader.last_rows))
        if len(self.unchecked) >= self.every_steps:
            self.settle()

    def start_from_here(self) -> None:
        """Take the statistics as they are now for good, after a checkpoint was loaded."""
        for statistics in self.statistics:
            statistics.keep()

    def settle(self) -> None:
        """Look at the steps since the last time; to be called before the model is saved or evaluated."""
        if not self.unchecked:
            return
        norms = torch.stack([grad_norm for grad_norm, *_ in self.unchecked]).tolist()
        for norm, (_, epoch, batches_done, rows) in zip(norms, self.unchecked, strict=True):
            if math.isfinite(norm):
                self.bad_in_a_row = 0
                continue
            self.bad_in_a_row += 1
            self.num_bad_steps += 1
            step = epoch * len(self.train_loader) + batches_done
            message = (
                f"step {step}: the gradient norm is not finite, the step was skipped; this rank's "
                f"batch: {self._names(rows['sample'])}"
            )
            if self.bad_in_a_row >= self.max_bad_steps:
                raise FloatingPointError(
                    f"{message}; that were max_bad_steps={self.max_bad_steps} in a row: lower "
                    "optimizer.lr, set clip_grad_norm or look at these files"
                )
            log.warning(message)
        self.unchecked.clear()

    def _names(self, samples: np.ndarray) -> str:
        files = self.train_loader.index.files
        names = [files[0][i] if files else f"sample {i}" for i in samples[:NAMED_FILES]]
        return ", ".join(names) + (" ..." if len(samples) > NAMED_FILES else "")


class Kept:
    """Tensors of one type and a copy of them, made and put back by few kernels for all of them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.copy, self.copy_of_each = _room_for(tensors)
        self.current, self.current_of_each = _room_for(tensors)

    def keep(self) -> None:
        """Copy the tensors as they are now."""
        torch._foreach_copy_(self.copy_of_each, self.tensors)

    def restore_if(self, condition: Tensor) -> None:
        """Where the condition, one boolean, holds: give them the kept values back. Else keep them."""
        torch._foreach_copy_(self.current_of_each, self.tensors)
        torch.where(condition, self.copy, self.current, out=self.copy)
        torch._foreach_copy_(self.tensors, self.copy_of_each)


def _room_for(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A copy of them in one piece, and the part that is each tensor's."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    parts = whole.split([tensor.numel() for tensor in tensors])
    return whole, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
