"""Several ranks."""

from typing import Any

RESUMED: list[Any] = [("train_ddp.py", [], 0)]
SCRIPTS = ["train_ddp.py"]
NUMBERS_OF_RANKS = [2]
LIKE_ONE_PROCESS: list[Any] = [
    ("train_ddp.py", "sgd", [], 1e-5, 1e-4),
    ("train_ddp.py", "muon", [], 1e-3, 1e-3),  # Muon computes in bfloat16
]
OUT_OF_MEMORY = [
    ("train_ddp.py", "raise torch.OutOfMemoryError('Tried to allocate 9 GiB')", "9 GiB"),
]
