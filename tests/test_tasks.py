"""The promises of every task, those of classification, and a task of one's own.

The other tasks have test_task_dense.py and test_task_table.py.
"""

import math
from collections.abc import Callable, Sequence
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


def check_contract(task: Any, outputs: Tensor, targets: Tensor) -> None:
    """Losses are the means of sums, sums add up, and nothing waits for the device."""
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


def check_refused(build: Callable[..., Task], *wrong: str) -> None:
    for override in wrong:
        with refused(override):
            build(override)


def check_weights(build: Callable[..., Task], batch_of: Callable[[int], Any]) -> None:
    """`loss.weights` multiply the loss of their class; `auto` gives the same share to each.

    `batch_of` returns outputs that prefer none of three classes, and targets of one class alone.
    """
    for weights, expected in (("[1,0.5,4]", [1, 0.5, 4]), ("auto", [50 / 75, 1, 2])):
        task = build(f"loss.weights={weights}", num_classes=3, counts=(75, 0, 25))
        losses = [task.loss(*batch_of(number)).item() / math.log(3) for number in range(3)]
        assert losses == pytest.approx(expected)


def classification(*overrides: str, num_classes: int = 7, **options: Any) -> Any:
    target = Target("labels", names=names(num_classes))
    return build("classification", target, *overrides, **options)


def batch(num_images: int = 12, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(num_classes, (num_images,), generator=generator)
    return 3 * random(num_images, num_classes), targets


@pytest.mark.parametrize("option", ["task.label_smoothing=0.1", "loss.weights=[1,2,3,4,5,6,0]"])
def test_classification_keeps_the_contract(option: str) -> None:
    check_contract(classification(option), *batch())
    wrong = ("[1, 2]", "[1, 2, 3, 4, 5, 6, -1]", "[1, 2, 3, 4, 5, 6, nan]")
    check_refused(classification, "task.loss=l1", *(f"loss.weights={x}" for x in wrong))
    with refused("task=classification is for labels", "are images"):
        build("classification", Target("images"))
    check_weights(classification, lambda c: (torch.zeros(1, 3), torch.tensor([c])))


def test_top1_and_top5_count_hits_and_a_row_names_the_likeliest_classes() -> None:
    task = classification()
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    metrics = metrics_of(task, outputs, torch.tensor([6, 2, 1, 5]))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)
    assert metrics_of(classification(num_classes=5), *batch(num_classes=5)).keys() == {
        "loss",
        "top1",
    }
    row = dict(zip(task.columns, task.table_rows(outputs)[3], strict=True))
    likeliest = [row["prediction"], *(row[f"top{place}"] for place in range(2, 6))]
    assert likeliest == ["class 6", "class 5", "class 4", "class 3", "class 2"]
    assert row["probability2"] == pytest.approx(outputs[3].softmax(0)[5].item(), abs=1e-6)


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    """And so are the metrics of each class. Class 5 is true and never predicted, class 4 the
    reverse, class 6 neither."""
    from sklearn.metrics import confusion_matrix

    outputs, targets = batch(300)
    outputs[:, [5, 6]] = -9.0
    targets[(targets == 4) | (targets == 6)] = 5
    task, guesses = classification(), outputs.argmax(dim=1)
    sums = task.sums(outputs, targets)
    expected = confusion_matrix(targets, guesses, labels=range(7))
    assert np.array_equal(sums[-49:].view(7, 7).numpy(), expected)
    check_by_class(task.class_metrics(sums), targets, guesses)
