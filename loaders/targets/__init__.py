"""The kinds of targets, one file for each: labels, several labels, numbers, images, masks."""

from loaders.targets.base import Target, describe_target
from loaders.targets.facts import target_of
from loaders.targets.image_target import (
    ImageSpec,
    ImageTarget,  # part: pairs|restoration|masks|segmentation
)
from loaders.targets.images import TargetImages
from loaders.targets.labels import Labels
from loaders.targets.masks import Masks
from loaders.targets.multilabels import MultiLabels
from loaders.targets.numbers import RegressionTargets
from loaders.targets.unlabelled import Unlabelled

__all__ = [
    "ImageSpec",
    "ImageTarget",  # part: pairs|restoration|masks|segmentation
    "Labels",
    "Masks",
    "MultiLabels",
    "RegressionTargets",
    "Target",
    "TargetImages",
    "Unlabelled",
    "describe_target",
    "target_of",
]
