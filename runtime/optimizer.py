"""Optimizer and learning-rate schedule."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.weights import head_of, is_in

if TYPE_CHECKING:
    from conf.schema import Config


def build_optimizer(
    cfg: "Config", model: nn.Module, steps_per_epoch: int
) -> tuple[Optimizer, "Schedule"]:
    """Optimizer, and its schedule to be stepped once per optimizer step.

    The learning rate rises linearly from 1 % of its peak during `optimizer.warmup_epochs` and then
    follows a cosine to 0 at the last step of `cfg.epochs` (Loshchilov and Hutter 2017, "SGDR").

    The optimizers are fused: one kernel for all weights, which can also skip a step on the device. SGD
    of weights that FSDP has split has no such kernel. Frozen weights are none of the optimizer's.
    """
    options = cfg.optimizer
    groups = parameter_groups(model, options.lr, options.backbone_lr_scale)
    optimizer: Optimizer
    if options.name == "sgd":
        optimizer = SGD(
            groups,
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            nesterov=options.momentum > 0,
            fused=not any(hasattr(p, "to_local") for p in model.parameters()),
        )
        for parameter in (p for group in groups for p in group["params"]):
            # Left uninitialised if the very first step is skipped, unless it is there already.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    else:
        optimizer = AdamW(groups, lr=options.lr, weight_decay=options.weight_decay, fused=True)

    total_steps = cfg.epochs * steps_per_epoch
    warmup_steps = round(options.warmup_epochs * steps_per_epoch)
    cosine_steps = max(1, total_steps - warmup_steps)  # none if less than half a step is left

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return 0.01 + 0.99 * step / warmup_steps
        return (1 + math.cos(math.pi * (step - warmup_steps) / cosine_steps)) / 2

    return optimizer, Schedule(optimizer, share_of_peak)


def parameter_groups(model: nn.Module, lr: float, backbone_scale: float) -> list[dict[str, Any]]:
    """The weights that learn: all with the rate `lr`, or the head with `lr` and all else with a share of it.

    The head comes first: its rate is the one that is logged.
    """
    if not backbone_scale > 0:
        raise ValueError(
            f"optimizer.backbone_lr_scale={backbone_scale} is not above 0; use 0.1, for example, or "
            "model.freeze=backbone"
        )
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if backbone_scale == 1:
        return [{"params": [p for _, p in learning]}]
    head = head_of(model)
    backbone = [p for name, p in learning if not is_in(name, head)]
    groups: list[dict[str, Any]] = [{"params": [p for name, p in learning if is_in(name, head)]}]
    return groups + ([{"params": backbone, "lr": lr * backbone_scale}] if backbone else [])


class Schedule(LambdaLR):
    """A schedule that a resumed run follows from its first step on, also where its `epochs` differ."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To be called when the optimizer's state was loaded, which holds the rate of then."""
        # The rates of the groups stay those of the configuration, which may be other ones now.
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        # Arrive at the same step once more, which sets its rate.
        self.last_epoch -= 1
        self.step()
        self._step_count -= 1
