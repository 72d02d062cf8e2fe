"""Samples without targets."""

from dataclasses import dataclass

from loaders.targets.base import Target


@dataclass(frozen=True)
class Unlabelled(Target):
    """No targets: the samples are there to be predicted. In a batch (B,): the samples' numbers."""

    kind = "unknown"
    dtype = "int64"

    predicted: Target
    """Target that the model was trained on, without values."""
