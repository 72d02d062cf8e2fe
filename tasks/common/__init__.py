"""What tasks share: weights and metrics of classes, and pictures."""

from tasks.common.classes import class_weights, metrics_by_class
from tasks.common.pictures import (
    as_pictures,
    class_colours,
    coloured,
    confusion_matrix,
    with_answers,
)
