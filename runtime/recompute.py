"""Activation checkpointing: backward computes again what forward does not keep."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.blocks import blocks_of, has_layers

log = logging.getLogger(__name__)


def recompute(model: nn.Module) -> nn.Module:
    """Let the blocks of a model keep only their inputs for backward, which computes the rest again.

    A single layer, which keeps hardly more than its input, stays as it is, and so does a block that
    begins with a layer that changes its input in place. The classes of the other blocks become
    subclasses, as `fully_shard` makes them: the names of the weights stay the same.
    """
    count = 0
    for block in blocks_of(model):
        first = next(layer for layer in block.modules() if not has_layers(layer))
        if not getattr(first, "inplace", False):
            own, count = type(block), count + 1
            block.__class__ = type(f"Recomputed{own.__name__}", (Recomputed, own), {})
    level = logging.INFO if count else logging.WARNING
    log.log(level, "backward computes %d blocks of the model again", count)
    return model


class Recomputed(nn.Module):
    """Block whose backward repeats its forward with the same random numbers and buffers.

    Buffers change once: the second time, updates such as those of BatchNorm's statistics go to
    copies of what the buffers were before forward.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        forward = partial(super().forward, **named)
        if not torch.is_grad_enabled():
            return forward(*inputs)
        copies = [[*x] if isinstance(x, list) else x for x in inputs]  # DenseNet appends to a list
        if torch.compiler.is_compiling():  # a compiled backward repeats no changes of buffers
            return checkpoint(forward, *copies, use_reentrant=False)
        return checkpoint(forward, *copies, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of forward and of its repetition."""
        copies = [
            (module, name, buffer.clone())
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        return nullcontext(), with_buffers(copies)


@contextmanager
def with_buffers(others: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Put other buffers in place of those of modules."""
    own = [(module, name, getattr(module, name)) for module, name, _ in others]
    for place in others:
        setattr(*place)
    try:
        yield
    finally:
        for place in own:
            setattr(*place)
