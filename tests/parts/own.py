"""Own data sets."""

MISTAKES = [
    ("train.py data=own data.name=digits loader=synthetic", "loader.name=synthetic"),
]
PHOTOS = [("data=huggingface", "resnet18", 16, None), ("data=own", None, 64, None)]
