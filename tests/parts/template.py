"""What only the template has: published experiments and their data."""

MISTAKES = [
    ("train.py experiment=cell", "did you mean cells?"),
    ("-m benchmarks.generate nothing --root FOLDER --size 9", "invalid choice: 'nothing'"),
    ("-m benchmarks.generate cells --root FOLDER --size 1", "size=1 is too small for cells"),
]
PHOTOS = [
    ("experiment=caltech256", "resnet50", 64, None),
    ("experiment=caltech256 model.arch=resnet18", "resnet18", 64, None),
]
