"""Gradient accumulation."""

MISTAKES = [
    ("train_accumulate.py accumulate_steps=3", "accumulate_steps=3"),
    ("train_accumulate.py accumulate_steps=many", "1 or more, or auto"),
]
LIKE_ONE_PROCESS = [
    ("train_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
]
IN_EPOCHS_OF_STEPS = [("train_accumulate.py", ["accumulate_steps=2", "loader.num_workers=1"])]
