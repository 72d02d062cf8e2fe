"""NVIDIA DALI."""

WAYS = {"dali": ["loader=dali", "loader.num_threads=2"]}
WAYS_OF_A_BATCH = {"docs/dali.md": lambda photos, folder: ["loader=dali"]}
IN_EPOCHS_OF_STEPS = [("train.py", ["loader=dali"])]
