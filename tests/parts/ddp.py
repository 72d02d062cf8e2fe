"""Several ranks."""

from typing import Any

RESUMED: list[Any] = [("train_ddp.py", [], 0)]
KILLED = [("train_ddp.py", 2)]
NOT_FINITE = [
    ("train_ddp.py", "if rank == 1: inputs.fill_(float('nan'))", "rank 0"),
    ("train_ddp.py", "if rank == 1: next(model.buffers()).fill_(float('nan'))", "rank 1"),
]
SCRIPTS = ["train_ddp.py"]
NUMBERS_OF_RANKS = [2]
LIKE_ONE_PROCESS: list[Any] = [
    ("train_ddp.py", "sgd", [], 1e-5, 1e-4),
    ("train_ddp.py", "muon", [], 1e-3, 1e-3),  # Muon computes in bfloat16
]
