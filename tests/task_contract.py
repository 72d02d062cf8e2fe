"""The promises of every task, and helpers that the tests of single tasks share."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.schema import Config, DataConfig, TaskConfig
from loaders import DataInfo
from loaders.targets import Target
from tasks import Task, build_task
from tests.helpers import refused


def names(count: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(count))


def build(
    name: str,
    loss: str,
    target: Target,
    weights: Any = None,
    counts: Sequence[float] = (),
    value_range: Sequence[float] = (0.0, 1.0),
    **options: Any,
) -> Any:
    """The task, built as a script builds it, for 100 training samples, `counts` of each class."""
    data = DataConfig(layout="mine", value_range=list(value_range))
    cfg = Config(task=TaskConfig(name=name, loss=loss, **options), data=data)
    cfg.loss.weights = weights
    info = DataInfo(
        target=target, num_samples=100, class_counts=lambda: np.array(counts, dtype=float)
    )
    loader: Any = SimpleNamespace(info=info, device=torch.device("cpu"))
    return build_task(cfg, loader)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    images = task.images(outputs)
    assert task.makes_images == (images is not None and len(images) == num_images)
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


def check_refused(build: Callable[..., Task], *wrong: tuple[str, Any]) -> None:
    """Options that the task does not take are refused with key and value."""
    for name, value in wrong:
        with refused(f".{name}={value}"):
            build(**{name: value})


def check_weights(build: Callable[..., Task], batch_of: Callable[[int], Any]) -> None:
    """`loss.weights` multiply the loss of their class; `auto` gives the same share to each.

    `batch_of` returns outputs that prefer none of three classes, and targets of one class alone.
    """

    def weights_of(task: Task) -> list[float]:
        return [task.loss(*batch_of(number)).item() / math.log(3) for number in range(3)]

    assert weights_of(build(3, weights=[1, 0.5, 4])) == pytest.approx([1, 0.5, 4])
    absent = weights_of(build(3, weights="auto", counts=(75, 0, 25)))
    assert absent == pytest.approx([50 / 75, 1, 2])
