"""Skipping of steps whose gradients are not finite."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from conf.errors import UserError, first_few
from conf.schema import Config
from loaders import Loader
from runtime.progress import steps_done

log = logging.getLogger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class NonFiniteGuard:
    """Skips steps with a non-finite gradient norm, without waiting for the device in each step.

    The norm is that of gradients averaged over all ranks, which thus skip the same steps. On a GPU
    a fused optimizer is told by `found_inf` to change nothing, as a GradScaler does it; BatchNorm's
    statistics are restored on the device, and the host reads what was found at log points and in
    `settle()`. On a CPU, where reading does not wait, and with other optimizers, the gradients are
    removed.

    A GradScaler raises its scale until gradients overflow. A step is therefore bad only if the norm
    is not finite at a scale of 1 or less.
    """

    def __init__(self, cfg: Config, model: nn.Module, train_loader: Loader) -> None:
        self.train_loader = train_loader
        self.max_bad_steps, self.num_bad_steps = cfg.max_bad_steps, 0
        self.bad_in_a_row = 0
        # For each step: 0 if the norm is finite, else the scale; number and samples.
        self.unchecked: list[tuple[Tensor, int, Sequence[int]]] = []
        # BatchNorm's statistics by type, and their values after the last good step as one tensor:
        # an operation on each of them would be hundreds of launches a step.
        layers = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
        buffers = [buffer.view(-1) for layer in layers for buffer in layer.buffers()]
        dtypes = {buffer.dtype for buffer in buffers}
        self.statistics = [[b for b in buffers if b.dtype == dtype] for dtype in dtypes]
        self.keep_statistics()

    def state_dict(self) -> dict[str, int]:
        return {"num_bad_steps": self.num_bad_steps, "bad_in_a_row": self.bad_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_bad_steps, self.bad_in_a_row = state["num_bad_steps"], state["bad_in_a_row"]

    def keep_statistics(self) -> None:
        """Copy BatchNorm's current statistics, which replace those of a bad step."""
        self.kept = [torch.cat(buffers) for buffers in self.statistics]

    def _restore_statistics(self) -> None:
        for kept, buffers in zip(self.kept, self.statistics, strict=True):
            torch.split_with_sizes_copy(kept, [len(b) for b in buffers], out=buffers)

    def step(
        self, optimizer: Optimizer, grad_norm: Tensor, scaler: GradScaler | None = None
    ) -> None:
        """Call `optimizer.step()`, or the scaler's, which changes nothing if the L2 norm of all
        gradients, equal on all ranks, is not finite."""
        found_inf = (grad_norm - grad_norm).nan_to_num_(nan=1.0)  # 0 if it is finite, else 1
        is_told = not found_inf.is_cpu and bool(optimizer.defaults.get("fused"))
        if is_told:
            is_bad = found_inf.bool()
            self.kept = [
                torch.where(is_bad, kept, torch.cat(buffers))
                for kept, buffers in zip(self.kept, self.statistics, strict=True)
            ]
            self._restore_statistics()
        else:
            if found_inf:
                # Weights without gradients stay as they are.
                optimizer.zero_grad(set_to_none=True)
                self._restore_statistics()
            self.keep_statistics()
        if scaler is not None and scaler.is_enabled():
            found_inf = scaler.scale(found_inf)
            scaler.step(optimizer)
        elif is_told:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.step()
        loader = self.train_loader
        self.unchecked.append((found_inf, steps_done(loader), loader.last_samples))

    def settle(self) -> None:
        """Count the bad steps since the last call; called before the model is saved or evaluated.

        Raises:
            UserError: `max_bad_steps` steps in a row were bad.
        """
        if not self.unchecked:
            return
        scales = torch.stack([scale for scale, *_ in self.unchecked]).tolist()
        unchecked, self.unchecked = self.unchecked, []
        for scale, (_, step, samples) in zip(scales, unchecked, strict=True):
            if not 0 < scale <= 1:  # above 1, the step is the scaler's
                self.bad_in_a_row = 0
                continue
            self.bad_in_a_row += 1
            self.num_bad_steps += 1
            message = (
                f"step {step}: the gradient norm is not finite, the step was skipped; this rank's "
                f"batch: {first_few(map(self.train_loader.info.name_of, samples), 8)}"
            )
            if self.bad_in_a_row >= self.max_bad_steps:
                raise UserError(
                    f"{message}; max_bad_steps={self.max_bad_steps} in a row were skipped: check "
                    "these files, lower optimizer.lr or set clip_grad_norm, and use resume=auto"
                )
            log.warning(message)
