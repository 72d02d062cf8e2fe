"""Own data sets."""

MISTAKES = [
    ("train.py data=own data.name=digits data.fold=0", "fold_digits in loaders/own/digits.py"),
]
