"""Steps whose gradients are not finite change nothing."""

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from loaders import Loader

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

NAMED_FILES = 8


class NonFiniteGuard:
    """Skips steps with a non-finite gradient norm, without waiting for the device in each step.

    The norm is that of the gradients averaged over all ranks, so all ranks decide alike. On a GPU a fused
    optimizer itself skips the step (it looks at `found_inf`, as GradScaler uses it), and the running
    statistics of BatchNorm become those from before it, also on the device: the outcome does not depend
    on when somebody looks. That happens every `log.every_steps` steps and in `settle()`. On a CPU, whose
    answer nobody waits for, and with other optimizers, the gradients are removed.

    A GradScaler tries scales until gradients overflow: as long as its scale is above 1, that is its
    routine. What is not finite at a scale of 1 or less is a bad step.

    Attributes:
        num_bad_steps: bad steps so far.
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
        self.statistics = [buffer for layer in layers for buffer in layer.buffers()]
        self.start_from_here()

    def state_dict(self) -> dict[str, int]:
        return {"num_bad_steps": self.num_bad_steps, "bad_in_a_row": self.bad_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_bad_steps, self.bad_in_a_row = state["num_bad_steps"], state["bad_in_a_row"]

    def start_from_here(self) -> None:
        """Keep BatchNorm's statistics as they are now, for steps that have to be undone."""
        self.kept = [buffer.clone() for buffer in self.statistics]

    def check(self, grad_norm: Tensor, scaler: GradScaler | None = None) -> None:
        """To be called before `optimizer.step()` with the norm of all gradients.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad.
        """
        if grad_norm.is_cpu or not self.optimizer.defaults.get("fused"):
            if math.isfinite(grad_norm):
                self.start_from_here()
            else:
                self.optimizer.zero_grad(
                    set_to_none=True
                )  # weights without gradients stay as they are
                for now, kept in zip(self.statistics, self.kept, strict=True):
                    now.copy_(kept)
        else:
            found_inf = (grad_norm - grad_norm).nan_to_num_(nan=1.0)  # 0 if it is finite, else 1
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            is_bad = found_inf.bool()
            for now, kept in zip(self.statistics, self.kept, strict=True):
                torch.where(is_bad, kept, now, out=kept)
                now.copy_(kept)
        if scaler is not None:
            scale = scaler.scale(torch.ones_like(grad_norm))
            grad_norm = grad_norm.where(scale <= 1, 0)  # what is left for this guard to look at
        loader = self.train_loader
        self.unchecked.append((grad_norm, loader.epoch, loader.batches_done, loader.last_rows))
        if len(self.unchecked) >= self.every_steps:
            self.settle()

    def settle(self) -> None:
        """Look at the steps since the last time; to be called before the model is saved or evaluated."""
        if not self.unchecked:
            return
        norms = torch.stack([grad_norm for grad_norm, *_ in self.unchecked]).tolist()
        unchecked, self.unchecked = self.unchecked, []
        for norm, (_, epoch, batches_done, rows) in zip(norms, unchecked, strict=True):
            if math.isfinite(norm):
                self.bad_in_a_row = 0
                continue
            self.bad_in_a_row += 1
            self.num_bad_steps += 1
            step = epoch * len(self.train_loader) + batches_done
            names = self.train_loader.names(rows[:NAMED_FILES])
            message = (
                f"step {step}: the gradient norm is not finite, the step was skipped; this rank's "
                f"batch: {', '.join(names)}{' ...' if len(rows) > NAMED_FILES else ''}"
            )
            if self.bad_in_a_row >= self.max_bad_steps:
                raise FloatingPointError(
                    f"{message}; that were max_bad_steps={self.max_bad_steps} in a row: lower "
                    "optimizer.lr, set clip_grad_norm or look at these files"
                )
            log.warning(message)
