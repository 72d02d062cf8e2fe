"""The kinds of targets: labels, several labels, numbers, images, masks."""

from loaders.targets.kinds import (
    ImageSpec,
    Labels,
    Masks,
    MultiLabels,
    RegressionTargets,
    Target,
    TargetImages,
    Unlabelled,
    check_rounding,
    describe_target,
    target_of,
)
