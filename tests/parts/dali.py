"""NVIDIA DALI."""

WAYS = {"dali": ["loader=dali", "loader.num_threads=2"]}
WAYS_OF_A_BATCH = {"docs/dali.md": lambda photos, folder: ["loader=dali"]}
VALIDATED_WITHIN_EPOCHS = [("train.py", ["loader=dali"])]
