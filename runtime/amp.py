"""The dtype of mixed precision."""

import logging

import torch

log = logging.getLogger(__name__)

BFLOAT16 = ("avx512_bf16", "bf16")
"""Instructions for bfloat16, of x86 and of ARM."""


def amp_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of autocast's low precision: `float16`, `bfloat16`, `float32` (off), or for
    `auto` float16 on CUDA; on a CPU bfloat16, or float32, as the log then says, if it has no
    instructions for bfloat16. Most CPUs take many times as long in float16."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.float16
    features = torch.cpu.get_capabilities()
    if any(features.get(feature) for feature in BFLOAT16):
        return torch.bfloat16
    log.info(
        "amp.dtype=auto: float32, since this CPU has no instructions for bfloat16; "
        "amp.dtype=bfloat16 computes in it all the same"
    )
    return torch.float32
