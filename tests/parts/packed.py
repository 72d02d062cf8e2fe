"""Packs of decoded images."""

COPIES = {"packed": ["loader=packed"]}
MISTAKES = [
    ("train.py loader=packed", "loader.pack=DIR"),
    ("train.py loader=packed loader.pack=nowhere", "loader.pack=nowhere"),
    ("-m loaders.pack", "out="),
    ("-m loaders.pack data.crop=[1, 2] out=FOLDER", "data.crop=[1, 2]"),
]
WITHOUT_TEST_SPLIT = [["loader=packed", "loader.pack=x"]]
