"""Samples without targets."""

from dataclasses import dataclass

from loaders.targets.base import Target


@dataclass(frozen=True)
class Unlabelled(Target):
    """Nothing is known of the samples: they are there to be predicted. In a batch (B,): their numbers."""

    kind = "unknown"
    dtype = "int64"

    predicted: Target
    """Target that the model was trained on, without values."""
