"""Exchange of gradients once per optimizer step, which has several backward passes."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    set_sync: Any = getattr(model, "set_requires_gradient_sync", None)  # FSDP's
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif set_sync is not None:
        set_sync(syncs)
