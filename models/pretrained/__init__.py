"""Fine-tuning: fit weights into a model that differs from theirs, and train its head alone."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError, first_few
from conf.schema import ModelConfig

log = logging.getLogger(__name__)


def fitting_weights(
    model: nn.Module, cfg: ModelConfig, saved: dict[str, Tensor], with_head: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of `saved` that fit the model, without the head's if that is for other
    outputs; log which parameters have one. Raise UserError if nothing fits.

    A first convolution that differs only in its input channels gets the mean over the file's
    channels: the response to an image whose channels are equal stays the same.
    """
    own, head = model.state_dict(), () if with_head else head_of(model)
    parameters = {name: own[name] for name, _ in model.named_parameters()}
    wanted = [name for name in own if name in saved and not is_in(name, head)]
    fitting = {name: saved[name] for name in wanted if saved[name].shape == own[name].shape}
    first, note = first_convolution(model), ""
    if first in saved and first not in fitting:
        old, new = saved[first], own[first]
        if old.shape[:1] + old.shape[2:] == new.shape[:1] + new.shape[2:]:
            there, here = old.shape[1], new.shape[1]
            fitting[first] = old.mean(dim=1, keepdim=True).expand_as(new) * there / here
            note = f"; {first} is adapted from {there} to {here} channels (mean over channels)"
    loaded = [name for name in parameters if name in fitting]
    if all(own[name].ndim < 2 for name in loaded):  # a bias of the right size is no fit
        raise UserError(
            f"model.weights={cfg.weights}: nothing fits model={cfg.name}; the file has "
            f"{_shapes(saved) or 'no tensors'}, the model {_shapes(parameters)}; use "
            "the weights of such a model, with the same model.kwargs"
        )
    fresh = _shapes({name: own[name] for name in parameters if name not in fitting}) or "nothing"
    num_loaded = f"{len(loaded)} of {len(parameters)} parameter tensors are loaded"
    log.info("model.weights=%s: %s%s", cfg.weights, num_loaded, note)
    log.info("model.weights=%s: newly initialized: %s", cfg.weights, fresh)
    return fitting


def zeros_for_head(model: nn.Module, fitting: Iterable[str]) -> dict[str, Tensor]:
    """Return zeros for the head's last layer, unless it is among the names of fitting weights.

    The outputs are then equal for all classes at first, and no gradients of a random head reach the
    layers below (Kolesnikov et al. 2020, "Big Transfer", section 3.3).
    """
    head = {name: p for name, p in model.named_parameters() if is_in(name, head_of(model))}
    last = [name.rpartition(".")[0] for name in head][-1:]
    fresh = [name for name in head if is_in(name, last) and name not in fitting]
    return {name: torch.zeros_like(head[name]).detach() for name in fresh}


def head_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the head's modules: the model's `head_name`, one name or a tuple, or else
    its last layer with parameters."""
    if named := getattr(model, "head_name", ""):
        return (named,) if isinstance(named, str) else tuple(named)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return tuple(name.rpartition(".")[0] for name in parameters[-1:])


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Return True if the parameter or module `name` is one of the modules, or lies in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def first_convolution(model: nn.Module) -> str:
    """Return the name of the weight of the first convolution; empty if there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    return f"{names[0]}.weight" if names else ""


def freeze_as(freeze: str | None, model: nn.Module) -> None:
    """Keep all layers but the head in evaluation mode if `freeze` is `statistics` or `backbone`;
    with `backbone`, they get no gradients."""
    if freeze is None:
        return
    head = head_of(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(freeze == "statistics" or is_in(name, head))
    # The modules around the head keep the mode: a model may ask for it, as `self.training`.
    names = [name for name, _ in model.named_modules() if name and not is_in(name, head)]
    frozen = [name for name in names if not any(is_in(part, [name]) for part in head)]
    outermost = [name for name in frozen if name.rpartition(".")[0] not in frozen]

    def stay_in_evaluation(model: nn.Module, inputs: Any) -> None:
        """Undo the `model.train()` of a script, before the model computes."""
        for name in outermost:
            # By name: other modules may have taken the place of these, as SyncBatchNorm.
            module = model.get_submodule(name)
            if module.training:
                module.eval()

    model.register_forward_pre_hook(stay_in_evaluation)


def _shapes(tensors: dict[str, Tensor]) -> str:
    """Return names and shapes of tensors, such as `fc.weight (5x512), fc.bias (5)`."""
    return first_few(f"{name} ({'x'.join(map(str, x.shape))})" for name, x in tensors.items())
