"""Fine-tuning: a run that starts from weights (`model.weights`), and the backbone's own rate."""

from typing import Any

from torch import nn

from conf.schema import Config, OptimizerConfig
from loaders import Loader
from models.pretrained import fitting_weights, head_of, initial_weights, is_in
from runtime.facts import check_facts, differences, facts_of
from runtime.group import SingleProcess
from runtime.state import load_into


def start_from(cfg: Config, model: nn.Module, loader: Loader, group: SingleProcess) -> None:
    """Load the `cfg.model.weights` that fit the model; the head only if its outputs are the same.

    Raises:
        UserError: as `initial_weights()` and `fitting_weights()`.
    """
    saved, facts = group.broadcast_from_rank0(
        lambda: initial_weights(cfg.model, loader.in_channels)
    )
    if facts:
        check_facts(facts, str(cfg.model.weights))
    differing = differences(facts, facts_of(loader)).keys() if facts else set()
    fitting = fitting_weights(model, cfg.model, saved, with_head=differing <= {"in_channels"})
    load_into(model, model.state_dict() | fitting, group)


def with_backbone_rate(
    groups: list[dict[str, Any]], model: nn.Module, options: OptimizerConfig
) -> list[dict[str, Any]]:
    """Divide the optimizer's groups into those of the head, which come first because the first rate
    is logged, and those of all other layers, whose rate is `lr` times `backbone_lr_scale`."""
    head = head_of(model)
    in_head = {id(p) for name, p in model.named_parameters() if is_in(name, head)}
    divided = []
    for is_slow in (False, True):
        rate = {"lr": options.lr * options.backbone_lr_scale} if is_slow else {}
        for group in groups:
            if params := [p for p in group["params"] if (id(p) not in in_head) == is_slow]:
                divided.append({**group, "params": params, **rate})
    return divided
