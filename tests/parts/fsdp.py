"""FSDP."""

from typing import Any

RESUMED: list[Any] = [("train_fsdp.py", [], 0)]
FINISHED = ["-m runtime.whole run={run}"]
LIKE_ONE_PROCESS = [
    ("train_fsdp.py", "sgd", ["model.channels_last=true"], 1e-5, 1e-4),
    ("train_fsdp.py", "adamw", [], 1e-3, 1e-4),
    ("train_fsdp.py", "muon", [], 1e-3, 1e-3),  # Muon computes in bfloat16
]
SHARDING = ["train_fsdp.py"]
