"""Steps whose gradients are not finite change nothing."""

import logging
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
        # Of each step 1 if it is bad, the epoch, the number of its batches so far, and the rows.
        self.unchecked: list[tuple[Tensor, int, int, np.ndarray]] = []
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.statistics = [buffer for layer in layers for buffer in layer.buffers()]
        self.known_good = [buffer.clone() for buffer in self.statistics]

    def state_dict(self) -> dict[str, int]:
        return {"num_bad_steps": self.num_bad_steps, "bad_in_a_row": self.bad_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_bad_steps, self.bad_in_a_row = state["num_bad_steps"], state["bad_in_a_row"]

    def check(self, grad_norm: Tensor) -> None:
        """To be called before `optimizer.step()` with the norm of all gradients.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad.
        """
        found_inf = (grad_norm - grad_norm).nan_to_num_(nan=1.0)  # 0 if it is finite, else 1
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if found_inf.device.type != "cpu" or found_inf:  # on a CPU nobody waits for the answer
            is_bad = found_inf.bool()
            for current, kept in zip(self.statistics, self.known_good, strict=True):
                torch.where(is_bad, kept, current, out=current)
        self.start_from_here()
        loader = self.train_loader
        self.unchecked.append((found_inf, loader.epoch, loader.batches_done, loader.last_rows))
        if len(self.unchecked) >= self.every_steps:
            self.settle()

    def start_from_here(self) -> None:
        """Take the statistics as they are now for good, after a checkpoint was loaded."""
        if self.statistics:
            torch._foreach_copy_(self.known_good, self.statistics)

    def settle(self) -> None:
        """Look at the steps since the last time; to be called before the model is saved or evaluated."""
        if not self.unchecked:
            return
        flags = torch.stack([found_inf for found_inf, *_ in self.unchecked]).tolist()
        for is_bad, (_, epoch, batches_done, rows) in zip(flags, self.unchecked, strict=True):
            self.bad_in_a_row = self.bad_in_a_row + 1 if is_bad else 0
            if not is_bad:
                continue
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
