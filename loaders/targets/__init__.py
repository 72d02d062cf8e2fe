"""The kinds of targets: labels, several labels, numbers, images, masks."""

from loaders.targets.facts import describe_missing, describe_target, target_of
from loaders.targets.kinds import (
    ImageSpec,
    ImageTarget,
    Labels,
    Masks,
    MultiLabels,
    RegressionTargets,
    Target,
    TargetImages,
    Unlabelled,
)
