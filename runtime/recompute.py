"""Activation checkpointing: backward computes again what forward does not keep."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conf.errors import counted
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
    log.log(level, "backward computes %s of the model again", counted(count, "block"))
    return model


class Recomputed(nn.Module):
    """Block whose backward repeats its forward with the same random numbers and buffers."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **named)
        copies = [[*x] if isinstance(x, list) else x for x in inputs]  # DenseNet appends to a list
        if not torch.compiler.is_compiling():  # a compiled backward repeats no changes of buffers
            named["context_fn"] = partial(contexts_of, self)
        return checkpoint(super().forward, *copies, use_reentrant=False, **named)


def contexts_of(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return contexts of a forward and of its repetition, where updates such as those of
    BatchNorm's statistics go to copies of what the buffers were before forward."""
    inner = [(m, name) for m in block.modules() for name, _ in m.named_buffers(recurse=False)]
    copies = [getattr(*place).clone() for place in inner]

    @contextmanager
    def repeated() -> Iterator[None]:
        own = [getattr(*place) for place in inner]
        for place, copy in zip(inner, copies, strict=True):
            setattr(*place, copy)
        try:
            yield
        finally:
            for place, buffer in zip(inner, own, strict=True):
                setattr(*place, buffer)

    return nullcontext(), repeated()
