"""Optimizer, the groups of its weights, and learning-rate schedule."""

import inspect
import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conf.errors import UserError, counted, unknown_name
from conf.schema import Config, OptimizerConfig
from models.pretrained import head_of, is_in
from runtime.blocks import blocks_of
from runtime.process_group import is_sharded

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer)
    # The base class, one whose step calls the model, one for sparse gradients, and one that takes
    # no convolutions, as timm's does.
    if name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
}

FUSED = ("adam", "adamw", "sgd")
"""Optimizers with one kernel for all weights on every device, which can also skip a step."""


def build_optimizer(
    cfg: Config, model: nn.Module, steps_per_epoch: int
) -> tuple[Optimizer, "Schedule"]:
    """Build the optimizer of the weights that are trained and its schedule, stepped once per step.

    The learning rate rises linearly from 1 % of its peak during the warm-up and then follows
    `optimizer.schedule`, such as a cosine to 0 at the last step of `cfg.epochs` (Loshchilov and
    Hutter 2017, "SGDR"). In the first `optimizer.head_epochs`, that of all layers but the head is 0
    (Kumar et al. 2022, "Fine-tuning can distort pretrained features").
    """
    options, warmup_steps = cfg.optimizer, cfg.optimizer.warmup_steps
    total_steps = cfg.epochs * steps_per_epoch
    head_steps = round(options.head_epochs * steps_per_epoch)
    if warmup_steps is None:
        warmup_steps = round(options.warmup_epochs * steps_per_epoch)
    elif warmup_steps >= total_steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps} is not less than the "
            f"{counted(total_steps, 'step')} of epochs={cfg.epochs}; use a smaller value"
        )
    steps_left = max(1, total_steps - warmup_steps)  # none if less than half a step is left

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return 0.01 + 0.99 * step / warmup_steps
        if options.schedule == "cosine":
            return (1 + math.cos(math.pi * (step - warmup_steps) / steps_left)) / 2
        if options.schedule == "linear":
            return 1 - (step - warmup_steps) / steps_left
        if options.schedule == "step":
            return options.step_factor ** (step // (options.step_epochs * steps_per_epoch))
        return 1.0

    def share_below_head(step: int) -> float:
        return share_of_peak(step) if step >= head_steps else 0.0

    optimizer = new_optimizer(options, model)
    shares: list[Any] = [
        share_of_peak if group["is_head"] else share_below_head for group in optimizer.param_groups
    ]
    return optimizer, Schedule(optimizer, shares)


def new_optimizer(options: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Build the optimizer `options.name` for the weights that are trained, fused if PyTorch can."""
    name, kwargs = options.name.lower(), dict(options.kwargs)
    new = OPTIMIZERS.get(name) or optimizer_of_timm(options.name)
    arguments: dict[str, Any] = {"lr": options.lr}
    if "weight_decay" in inspect.signature(new).parameters:
        arguments["weight_decay"] = options.weight_decay
    elif options.weight_decay:
        raise UserError(
            f"optimizer.weight_decay={options.weight_decay} is not possible with optimizer.name="
            f"{options.name}, which has no weight decay; use 0"
        )
    # There is no fused SGD for weights that FSDP has sharded.
    has_shards = any(map(is_sharded, model.parameters()))
    if name in FUSED and not kwargs.get("foreach") and not (name == "sgd" and has_shards):
        kwargs.setdefault("fused", True)
    try:
        optimizer = new(parameter_groups(model, options), **arguments, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"optimizer.name={options.name} does not fit optimizer.kwargs={options.kwargs}: {error}"
        ) from error
    if name == "sgd" and optimizer.defaults["momentum"] and not optimizer.defaults["dampening"]:
        # The fused kernel would leave it uninitialised if the very first step is skipped.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def optimizer_of_timm(name: str) -> Any:
    """Return a class of timm's by its name there."""
    try:
        from timm.optim import get_optimizer_class, list_optimizers
    except ModuleNotFoundError:
        unknown = unknown_name("optimizer.name", name, OPTIMIZERS)
        raise UserError(f"{unknown}, or one of timm's after make setup EXTRAS=timm") from None
    if name.lower() in list_optimizers():
        return get_optimizer_class(name.lower(), bind_defaults=False)
    raise unknown_name("optimizer.name", name, {*OPTIMIZERS, *list_optimizers()})


def parameter_groups(model: nn.Module, options: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups of the weights that are trained, as `torch.optim` takes them.

    Each layer has `layer_decay` times the rate of the one above it (Clark et al. 2020, "ELECTRA";
    for ViTs, Bao et al. 2022, "BEiT"), and all but the head `backbone_lr_scale` times that. The
    head's groups come first, because the first rate is logged. Where the others are to differ from
    them, `is_head` is False of these.
    """
    head, scale, decay = head_of(model), options.backbone_lr_scale, options.layer_decay
    layers = layers_of(model) if decay != 1 else dict.fromkeys(model.parameters(), 0)
    top = max(layers.values(), default=0)
    groups = defaultdict[tuple[int, bool, bool], list[nn.Parameter]](list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            above = top - layers[parameter]
            is_apart = not is_in(name, head) and (scale != 1 or options.head_epochs > 0)
            is_undecayed = parameter.ndim < 2 and not options.decay_norms_and_biases
            groups[above, is_apart, is_undecayed].append(parameter)
    return [
        {
            "params": groups[above, is_apart, is_undecayed],
            "lr": options.lr * (scale if is_apart else 1) * decay**above,
            "is_head": not is_apart,
            "weight_decay": 0.0 if is_undecayed else options.weight_decay,
        }
        for above, is_apart, is_undecayed in sorted(groups)
    ]


def layers_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the layer of each weight: 0 below the first block of the model, the highest above the
    last one.

    timm's models know their layers. In others, each block is one, and what lies between two blocks
    belongs to the upper one.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        named = group_parameters(model, matcher(coarse=False), reverse=True)
        return {p: named[name] for name, p in model.named_parameters()}
    blocks, parameters = blocks_of(model), list(model.parameters())
    number_of = {p: number for number, x in enumerate(blocks, 1) for p in x.parameters()}
    first = next((place for place, p in enumerate(parameters) if p in number_of), 0)
    layers, layer = dict.fromkeys(parameters[:first], 0), len(blocks) + 1
    for parameter in reversed(parameters[first:]):
        layers[parameter] = layer = number_of.get(parameter, layer)
    return layers


class Schedule(LambdaLR):
    """Schedule of the configuration, which a resumed run follows from its first step on: the rate
    depends on the number of the step alone."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        groups = self.optimizer.param_groups
        for group, peak, share in zip(groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = peak * share(self.last_epoch)
