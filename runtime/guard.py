"""Steps whose gradients are not finite change nothing."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from loaders import Loader
from runtime.checkpoint import newest_first

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

NAMED_FILES = 8


class Statistics:
    """Buffers of one dtype, and what they were after the last good step.

    Both lie in one piece of memory: all buffers together take a GPU three operations, not two each.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.kept = torch.cat([buffer.flatten() for buffer in buffers])
        self.now = self.kept.clone()
        lengths = [buffer.numel() for buffer in buffers]
        self.kept_of_each, self.now_of_each = (
            [part.view_as(b) for part, b in zip(whole.split(lengths), buffers, strict=True)]
            for whole in (self.kept, self.now)
        )

    def undo_if(self, is_bad: Tensor) -> None:
        """Undo a bad step, or keep what it has made of the buffers, on the device."""
        torch._foreach_copy_(self.now_of_each, self.buffers)
        torch.where(is_bad, self.kept, self.now, out=self.kept)
        torch._foreach_copy_(self.buffers, self.kept_of_each)


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
        self,
        cfg: "Config",
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Loader,
        checkpoints: Path,
    ) -> None:
        self.model, self.optimizer, self.train_loader = model, optimizer, train_loader
        self.checkpoints = checkpoints
        self.max_bad_steps, self.every_steps = cfg.max_bad_steps, cfg.log.every_steps
        self.num_bad_steps = 0
        self.bad_in_a_row = 0
        # Of each step the norm, the epoch, the number of its batches so far, and the rows.
        self.unchecked: list[tuple[Tensor, int, int, np.ndarray]] = []
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        self.statistics = [
            Statistics([b for b in buffers if b.dtype == dtype])
            for dtype in {b.dtype for b in buffers}
        ]

    def state_dict(self) -> dict[str, int]:
        return {"num_bad_steps": self.num_bad_steps, "bad_in_a_row": self.bad_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_bad_steps, self.bad_in_a_row = state["num_bad_steps"], state["bad_in_a_row"]

    def start_from_here(self) -> None:
        """Keep BatchNorm's statistics as they are now, for steps that have to be undone."""
        for statistics in self.statistics:
            torch._foreach_copy_(statistics.kept_of_each, statistics.buffers)

    def check(self, grad_norm: Tensor, scaler: GradScaler | None = None) -> None:
        """To be called before `optimizer.step()` with the norm of all gradients.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad.
        """
        if grad_norm.is_cpu or not self.optimizer.defaults.get("fused"):
            if math.isfinite(grad_norm):
                self.start_from_here()
            else:
                # Weights without gradients stay as they are.
                self.optimizer.zero_grad(set_to_none=True)
                for statistics in self.statistics:
                    torch._foreach_copy_(statistics.buffers, statistics.kept_of_each)
        else:
            found_inf = (grad_norm - grad_norm).nan_to_num_(nan=1.0)  # 0 if it is finite, else 1
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            is_bad = found_inf.bool()
            for statistics in self.statistics:
                statistics.undo_if(is_bad)
        if scaler is not None:
            scale = scaler.scale(torch.ones_like(grad_norm))
            grad_norm = grad_norm.where(scale <= 1, 0)  # what is left for this guard to look at
        loader = self.train_loader
        self.unchecked.append((grad_norm, loader.epoch, loader.batches_done, loader.last_rows))
        if len(self.unchecked) >= self.every_steps:
            self.settle()

    def settle(self) -> None:
        """Look at the steps since the last time; to be called before the model is saved or evaluated.

        Raises:
            FloatingPointError: `max_bad_steps` steps in a row were bad, or one with a finite norm was too
                large for the weights or for the optimizer, which squares gradients.
        """
        steps = [grad_norm for grad_norm, *_ in self.unchecked]
        *norms, largest = torch.stack([*steps, self._largest_value()]).tolist()
        if not math.isfinite(largest):
            finite = max((norm for norm in norms if math.isfinite(norm)), default=math.inf)
            raise FloatingPointError(
                "the weights or the optimizer's averages are not finite any more: a gradient was too large "
                f"(norms of the steps looked at since: up to {finite:.3g}); {self._way_back()}"
            )
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
                    f"{message}; that were max_bad_steps={self.max_bad_steps} in a row: look at these "
                    f"files; {self._way_back()}"
                )
            log.warning(message)

    def _largest_value(self) -> Tensor:
        """Of the weights, BatchNorm's statistics and the optimizer's state on this rank: not finite if any
        of them is not."""
        tensors: list[Tensor] = list(self.model.parameters())
        # Other buffers may be infinite, such as the mask of an attention.
        for statistics in self.statistics:
            tensors += statistics.buffers
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        device = parts[0].device  # the counts of steps may lie elsewhere
        parts = [
            p.detach() for p in parts if p.numel() and p.is_floating_point() and p.device == device
        ]
        norms = torch._foreach_norm(parts, math.inf) if parts else [torch.zeros((), device=device)]
        return torch.stack(norms).max().float()

    def _way_back(self) -> str:
        good = newest_first(self.checkpoints)
        last = f"the last good checkpoint is {good[0]}" if good else "there is no checkpoint yet"
        return f"{last}; go on with a lower optimizer.lr or clip_grad_norm set"
