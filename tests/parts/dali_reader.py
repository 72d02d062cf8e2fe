"""DALI's own file reader."""

MISTAKES = [
    ("train.py loader.reader=native", "loader=dali_reader"),
]
