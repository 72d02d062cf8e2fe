"""The dtype of mixed precision."""

import torch


def amp_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of autocast's low precision.

    Args:
        name: `float16`, `bfloat16`, or `auto`: float16 on CUDA; on a CPU bfloat16, since most CPUs take
            many times as long in float16.
        device: that computes.
    """
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.bfloat16
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}[name]
