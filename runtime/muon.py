"""Muon for matrices and convolutions, AdamW for all other weights, in one optimizer.

timm's: `torch.optim.Muon` refuses convolutions, and would need a second optimizer beside it.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from conf.errors import UserError
from models.pretrained import head_of, is_in


def muon_class() -> type[Optimizer]:
    """Return timm's Muon; raise UserError if there is none."""
    try:
        from timm.optim import Muon
    except ImportError as error:
        raise UserError(f"optimizer.name=muon: {error}; pip install --upgrade timm") from error
    return Muon


def with_fallback(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Divide the optimizer's groups into those for Muon and those for AdamW.

    AdamW trains the head, embeddings, biases, norms and all else that is not the `weight` of a
    layer, such as a position embedding. Muon itself leaves depthwise convolutions and very thin
    matrices to AdamW.
    """
    head = head_of(model)
    modules = dict(model.named_modules())
    for_muon = {
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("weight")
        and parameter.ndim > 1
        and not is_in(name, head)
        and not isinstance(modules[name.rpartition(".")[0]], nn.Embedding)
    }
    divided = []
    for group in groups:
        for is_fallback in (False, True):
            if params := [p for p in group["params"] if (p not in for_muon) == is_fallback]:
                divided.append({**group, "params": params, "use_fallback": is_fallback})
    return divided
