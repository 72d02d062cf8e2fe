"""Optimizer and learning-rate schedule."""

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.weights import head_of, is_in

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)


def build_optimizer(
    cfg: "Config", model: nn.Module, steps_per_epoch: int
) -> tuple[Optimizer, "Schedule"]:
    """Build the optimizer and its schedule, which is stepped once per optimizer step.

    The learning rate rises linearly from 1 % of its peak during `optimizer.warmup_epochs` and then
    follows a cosine to 0 at the last step of `cfg.epochs` (Loshchilov and Hutter 2017, "SGDR").

    The optimizers are fused: one kernel for all weights, which can also skip a step on the device, except SGD with
    weights that FSDP has sharded, for which PyTorch has none. Frozen weights are left out.
    """
    options = cfg.optimizer
    groups = parameter_groups(model, options.lr, options.backbone_lr_scale)
    optimizer: Optimizer
    is_fused = options.name != "sgd" or not any(hasattr(p, "to_local") for p in model.parameters())
    if not is_fused:
        log.info("optimizer=sgd: not fused for sharded weights, each step waits for the device")
    if options.name == "sgd":
        optimizer = SGD(
            groups,
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            nesterov=options.momentum > 0,
            fused=is_fused,
        )
        for parameter in (p for group in groups for p in group["params"]):
            # The fused kernel would leave it uninitialised if the very first step is skipped.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    else:
        optimizer = AdamW(groups, lr=options.lr, weight_decay=options.weight_decay, fused=is_fused)

    total_steps = cfg.epochs * steps_per_epoch
    warmup_steps = round(options.warmup_epochs * steps_per_epoch)
    cosine_steps = max(1, total_steps - warmup_steps)  # none if less than half a step is left

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return 0.01 + 0.99 * step / warmup_steps
        return (1 + math.cos(math.pi * (step - warmup_steps) / cosine_steps)) / 2

    return optimizer, Schedule(optimizer, share_of_peak)


def parameter_groups(model: nn.Module, lr: float, backbone_scale: float) -> list[dict[str, Any]]:
    """Groups of the weights that are trained: all with the rate `lr`, or the head with `lr` and the others with
    `backbone_scale * lr`.

    The head comes first: its rate is logged.
    """
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if backbone_scale == 1:
        return [{"params": [p for _, p in learning]}]
    head = head_of(model)
    backbone = [p for name, p in learning if not is_in(name, head)]
    groups: list[dict[str, Any]] = [{"params": [p for name, p in learning if is_in(name, head)]}]
    return groups + ([{"params": backbone, "lr": lr * backbone_scale}] if backbone else [])


class Schedule(LambdaLR):
    """Schedule that a resumed run follows from its first step on, also if its `epochs` have changed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To be called after the optimizer's, whose state holds the rate at that time."""
        # The configuration decides the peak rates, which may have changed.
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        # Repeat the last step, which sets its rate.
        self.last_epoch -= 1
        self.step()
        self._step_count -= 1
