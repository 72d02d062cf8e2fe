"""Own data sets."""

MISTAKES = [
    (
        "train.py data=own data.name=digits data.fold=0",
        "loaders/own/digits.py has no class FoldDigits and no function fold_digits",
    ),
]
PHOTOS = [("data=huggingface", "resnet18", 16, None), ("data=own", None, 64, None)]
