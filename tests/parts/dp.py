"""DataParallel."""

from typing import Any

MISTAKES = [
    ("train_dp.py model.compile=true", "model.compile=true"),
]
BEGUN = ["train_dp.py model.compile=true"]
LIKE_ONE_PROCESS: list[Any] = [
    ("train_dp.py", "sgd", [], 1e-12, 1e-12),
]
