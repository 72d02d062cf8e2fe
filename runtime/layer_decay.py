"""Learning rates that fall from layer to layer, from the head down, for fine-tuning."""

from typing import Any

from torch import nn

from conf.schema import OptimizerConfig
from runtime.blocks import blocks_of


def with_layer_rates(
    groups: list[dict[str, Any]], model: nn.Module, options: OptimizerConfig
) -> list[dict[str, Any]]:
    """Divide the optimizer's groups by depth: each layer has `layer_decay` times the rate of the
    one above it (Clark et al. 2020, "ELECTRA"; for ViTs, Bao et al. 2022, "BEiT").

    The head's groups come first, because the first rate is logged.
    """
    depths = depths_of(model)
    top = max(depths.values())
    divided: dict[tuple[int, int], dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            above = top - depths[parameter]
            rate = group.get("lr", options.lr) * options.layer_decay**above
            new = {**group, "lr": rate, "params": []}
            divided.setdefault((above, number), new)["params"].append(parameter)
    return [divided[key] for key in sorted(divided)]


def depths_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the depth of each weight: 0 below the first block of the model, the highest above the
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
    depths, depth = dict.fromkeys(parameters[:first], 0), len(blocks) + 1
    for parameter in reversed(parameters[first:]):
        depths[parameter] = depth = number_of.get(parameter, depth)
    return depths
