"""Restoration by NAFNet."""

from tests.parts import Trained

MISTAKES = [
    ("train.py model=nafnet", "model=nafnet returns images of 1 channel,"),
]
TRAINED = [
    Trained(
        *("restoration", "pairs", ["model=nafnet", "model.kwargs.num_blocks=[1,1]"]),
        folder="test/blurry",
        columns=["image"],
        tolerance=1,
        values_of=lambda answer: 255 * answer,
    )
]
