"""Exchange of gradients once per optimizer step, which has several backward passes."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP gives it to a model
        model.set_requires_gradient_sync(syncs)
