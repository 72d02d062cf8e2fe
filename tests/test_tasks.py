"""The promises of every task, and the metrics of classification.

Those of the other tasks are in test_task_dense.py and test_task_table.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loaders import DataInfo
from loaders.targets import Target
from tasks import Task, build_task
from tests.helpers import make_config, refused
from tests.rows import rows


def names(count: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(count))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(task: str, target: Target, *overrides: str, counts: Sequence[float] = ()) -> Any:
    """The task, built as a script builds it, for 100 training samples, `counts` of each class."""
    info = DataInfo(target=target, num_samples=100, class_counts=lambda: np.array(counts, float))
    loader: Any = SimpleNamespace(info=info, device=torch.device("cpu"))
    return build_task(make_config(f"task={task}", *overrides), loader)


def metrics_of(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return task.metrics(task.sums(outputs, targets))


# Outputs and targets of some images.


def classes(num_images: int = 12, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(num_classes, (num_images,), generator=generator)
    return 3 * random(num_images, num_classes), targets


def masks() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(4, (6, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * random(6, 4, 9, 7), targets


def images() -> tuple[Tensor, Tensor]:
    """(2, 3, 13, 17): targets in [0, 1], outputs partly outside of it."""
    steps = torch.arange(2 * 3 * 13 * 17, dtype=torch.float64).reshape(2, 3, 13, 17)
    targets = 0.5 + 0.5 * torch.sin(0.37 * steps)
    noise = torch.tensor([0.05, 0.3], dtype=torch.float64).view(2, 1, 1, 1)
    return (targets + noise * torch.cos(1.7 * steps)).float(), targets.float()


def labels(num_images: int = 12) -> tuple[Tensor, Tensor]:
    targets = (random(num_images, 4, seed=1) < -0.25).float()
    return 2 * random(num_images, 4) + targets, targets


def numbers(num_images: int = 12) -> tuple[Tensor, Tensor]:
    targets = random(num_images, 2, seed=1) * torch.tensor([3.0, 0.1]) + 20
    return targets + random(num_images, 2), targets


EXAMPLES: dict[str, tuple[Target, Callable[[], tuple[Tensor, Tensor]]]] = {
    "classification": (Target("labels", names=names(7)), classes),
    "segmentation": (Target("masks", names=names(4), ignore_index=255), masks),
    "restoration": (Target("images"), images),
    "multilabel": (Target("several labels", names=names(4)), labels),
    "regression": (Target("numbers", names=("a", "b")), numbers),
}
ACCEPTED = {
    "classification": ["task.label_smoothing=0.1", "loss.weights=[1,2,3,4,5,6,0]"],
    "segmentation": ["task.label_smoothing=0.1", "loss.weights=[1,2,3,4]"],
    "restoration": ["task.loss=charbonnier", "task.loss=l1"],
    "multilabel": ["loss.weights=[1,2,3,4]"],
    "regression": ["task.loss=mse", "task.loss=l1"],
}
SIX = "loss.weights=[1, 2, 3, 4, 5, 6"
REFUSED = {
    "classification": ["task.loss=l1", f"{SIX}]", f"{SIX}, -1]", f"{SIX}, nan]"],
    "restoration": ["task.loss=mse", "task.label_smoothing=0.1", "loss.weights=auto"],
    "multilabel": ["task.loss=l1", "task.label_smoothing=0.1"],
    "regression": ["task.loss=bce", "task.label_smoothing=0.1", "loss.weights=auto"],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Each option of each task that a project has."""
    return [(task, x) for task in table if rows(f"task={task}") for x in table[task]]


@pytest.mark.parametrize(("name", "option"), cases(ACCEPTED))
def test_losses_are_means_of_sums_that_add_up_without_waiting_for_the_device(name, option) -> None:
    target, example = EXAMPLES[name]
    task, (outputs, targets) = build(name, target, option), example()
    whole = task.sums(outputs, targets)
    num_images = len(outputs)
    assert (whole.dtype, whole.shape) == (torch.float64, (task.num_sums,))
    assert (whole[0], task.num_outputs) == outputs.shape[:2]
    loss = task.loss(outputs, targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss.double(), whole[1] / whole[0], rtol=1e-6, atol=0)
    single = [task.sums(outputs[i : i + 1], targets[i : i + 1]) for i in range(num_images)]
    torch.testing.assert_close(torch.stack(single).sum(dim=0), whole, rtol=1e-6, atol=1e-9)

    metrics = task.metrics(whole)
    assert tuple(metrics) == task.metric_names
    assert all(math.isfinite(value) for value in metrics.values())
    with pytest.raises(ValueError, match="0 images"):
        task.metrics(torch.zeros_like(whole))
    half = outputs.bfloat16()
    assert torch.equal(task.sums(half, targets), task.sums(half.float(), targets))
    for wrong in (torch.cat([outputs, outputs[:, :1]], dim=1), {"out": outputs}):
        with refused(str(tuple(outputs.shape))):
            task.loss(wrong, targets)

    assert [len(row) for row in task.table_rows(outputs)] == num_images * [len(task.columns)]
    for channels in (1, 3):
        inputs = torch.rand(num_images, channels, 9, 7)
        drawn = task.visualize(inputs, outputs.bfloat16(), targets)
        for pictures in (*drawn.values(), *task.plots(whole).values()):
            assert (pictures.ndim, pictures.dtype) == (4, torch.float32)
            assert pictures.shape[1] in (1, 3)
            assert 0 <= pictures.min() <= pictures.max() <= 1

    # Tensors on the meta device have no values, which any `.item()` would ask for.
    task.weights = None
    assert task.sums(outputs.to("meta"), targets.to("meta")).device.type == "meta"


@pytest.mark.parametrize(("name", "override"), cases(REFUSED))
def test_what_a_task_does_not_take_is_refused(name: str, override: str) -> None:
    with refused(override):
        build(name, EXAMPLES[name][0], override)
    with refused("task=classification is for labels", "are images"):
        build("classification", Target("images"))


WEIGHTED = [name for name in ("classification", "segmentation") if rows(f"task={name}")]


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_multiply_the_loss_of_their_class_and_auto_gives_each_the_same_share(name) -> None:
    """Of three classes none is preferred. Pixels that are ignored have no loss."""
    target = replace(EXAMPLES[name][0], names=names(3))
    for weights, expected in (("[1,0.5,4]", [1, 0.5, 4]), ("auto", [50 / 75, 1, 2])):
        task = build(name, target, f"loss.weights={weights}", counts=(75, 0, 25))
        for number, weight in enumerate(expected):
            outputs, targets = torch.zeros(1, 3), torch.tensor([number])
            if name == "segmentation":
                outputs, targets = torch.zeros(1, 3, 1, 2), torch.tensor([[[number, 255]]])
            assert task.loss(outputs, targets).item() == pytest.approx(weight * math.log(3))


def check_by_class(by_class: dict[str, dict[str, Any]], targets: Tensor, guesses: Tensor) -> None:
    """Metrics of each class are those of scikit-learn; None where they are not defined."""
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(
        targets, guesses, labels=range(len(by_class)), zero_division=np.nan
    )
    for (name, found), row in zip(by_class.items(), zip(*columns, strict=True), strict=True):
        expected = [None if np.isnan(value) else pytest.approx(value) for value in row]
        assert [*found.values()] == expected, name
    assert [*found] == ["precision", "recall", "f1", "support"]


def test_top1_and_top5_count_hits_and_a_row_names_the_likeliest_classes() -> None:
    task = build("classification", Target("labels", names=names(7)))
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    metrics = metrics_of(task, outputs, torch.tensor([6, 2, 1, 5]))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)
    of_five = build("classification", Target("labels", names=names(5)))
    assert metrics_of(of_five, *classes(num_classes=5)).keys() == {"loss", "top1"}
    row = dict(zip(task.columns, task.table_rows(outputs)[3], strict=True))
    likeliest = [row["prediction"], *(row[f"top{place}"] for place in range(2, 6))]
    assert likeliest == ["class 6", "class 5", "class 4", "class 3", "class 2"]
    assert row["probability2"] == pytest.approx(outputs[3].softmax(0)[5].item(), abs=1e-6)


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    """And so are the metrics of each class. Class 5 is true and never predicted, class 4 the
    reverse, class 6 neither."""
    from sklearn.metrics import confusion_matrix

    outputs, targets = classes(300)
    outputs[:, [5, 6]] = -9.0
    targets[(targets == 4) | (targets == 6)] = 5
    task, guesses = build("classification", Target("labels", names=names(7))), outputs.argmax(dim=1)
    sums = task.sums(outputs, targets)
    expected = confusion_matrix(targets, guesses, labels=range(7))
    assert np.array_equal(sums[-49:].view(7, 7).numpy(), expected)
    check_by_class(task.class_metrics(sums), targets, guesses)
