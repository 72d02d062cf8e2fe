"""The dtype of mixed precision."""

import torch


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
