"""FSDP."""

from typing import Any

RESUMED: list[Any] = [("train_fsdp.py", [], 0)]
KILLED = [("train_fsdp.py", 3)]
NOT_FINITE = [
    ("train_fsdp.py", "if rank == 1: next(model.parameters()).to_local().fill_(float('inf'))", "/"),
]
LIKE_ONE_PROCESS = [
    ("train_fsdp.py", "sgd", ["model.channels_last=true"], 1e-5, 1e-4),
    ("train_fsdp.py", "adamw", [], 1e-3, 1e-4),
    ("train_fsdp.py", "muon", [], 1e-3, 1e-3),  # Muon computes in bfloat16
]
SHARDING = ["train_fsdp.py"]
