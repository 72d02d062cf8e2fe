"""Several ranks with mixed precision, whose images DALI decodes."""

from typing import Any

# The scale overflows at first: those steps are skipped.
FLOAT16 = ["amp.dtype=float16", "amp.init_scale=1e8"]
MIXED = ["train_ddp_amp.py"]
RESUMED = [("train_ddp_amp.py", ["loader=dali", *FLOAT16], 0)]
LIKE_ONE_PROCESS: list[Any] = [
    ("train_ddp_amp.py", "sgd", ["loader=dali"], 1e-5, 1e-4),
    ("train_ddp_amp.py", "sgd", ["loader=dali", "amp.dtype=bfloat16"], 2e-2, 0.1),
]
