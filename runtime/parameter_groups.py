"""The groups of an optimizer's weights, which differ in learning rate or decay."""

from typing import Any

from torch import nn

from conf.schema import OptimizerConfig
from models.pretrained import head_of, is_in
from runtime.blocks import blocks_of


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
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        above = top - layers[parameter]
        is_apart = not is_in(name, head) and (scale != 1 or options.head_epochs > 0)
        is_undecayed = parameter.ndim < 2 and not options.decay_norms_and_biases
        group = {
            "params": [],
            "lr": options.lr * (scale if is_apart else 1) * decay**above,
            "is_head": not is_apart,
        }
        if is_undecayed:
            group["weight_decay"] = 0.0
        key = (above, is_apart, is_undecayed)
        groups.setdefault(key, group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


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
