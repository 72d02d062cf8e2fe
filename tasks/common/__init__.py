"""What tasks share: their base class, sums and metrics, weights of classes, and pictures."""

from tasks.common.pictures import (
    as_pictures,
    class_colours,
    coloured,
    confusion_matrix,
    with_text,
)
from tasks.common.sums import count_of_each, divide_by_count, metrics_by_class, sum_columns
from tasks.common.task import Task, check_shape
from tasks.common.weights import class_weights, on_device
