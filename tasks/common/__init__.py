"""What tasks share: their base class, sums, weights and metrics of classes, and pictures."""

from tasks.common.classes import class_weights, metrics_by_class
from tasks.common.pictures import (
    as_pictures,
    class_colours,
    coloured,
    confusion_matrix,
    with_answers,
)
from tasks.common.sums import count_of_each, divide_by_count, sum_columns
from tasks.common.task import Task, check_shape
