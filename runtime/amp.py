"""The dtype of mixed precision."""

import torch
from torch import nn


def amp_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of autocast's low precision.

    Args:
        name: `float16`, `bfloat16`, `float32` (off), or `auto`: float16 on CUDA; on a CPU bfloat16,
            since most CPUs take many times as long in float16.
        device: device that computes.
    """
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.bfloat16
    return getattr(torch, name)


def gather_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let FSDP gather a model's weights in autocast's dtype; to be called before it is sharded.

    Autocast casts gathered float32 weights, and keeps the copies for backward: of all layers, on
    each rank. Does nothing without FSDP, and for blocks with BatchNorm.
    """
    model.gather_dtype = dtype  # type: ignore[assignment]
