"""The tasks: losses and metrics agree with their definitions, and sums add up exactly."""

import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import Config, DataConfig, LossConfig, TaskConfig
from loaders import Loader
from loaders.targets import Labels, Masks, Numbers, SeveralLabels, Target, TargetImages
from runtime import evaluate
from tasks import (
    TASKS,
    Classification,
    MultiLabel,
    Regression,
    Restoration,
    Segmentation,
    Task,
    build_task,
)
from tasks.multilabel import BINS_PER_LOGIT, LOWEST, NUM_BINS
from tests.helpers import DEVICES, free_port


def config(name: str, loss: str, label_smoothing: float = 0.0, **data: Any) -> Config:
    task = TaskConfig(name=name, loss=loss, label_smoothing=label_smoothing)
    return Config(task=task, data=DataConfig(layout="mine", **data), loss=LossConfig())


def names(count: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(count))


def data_with(target: Target, counts: list[float] | None = None) -> Loader:
    """A training loader as far as build_task() sees it."""
    loader: Any = SimpleNamespace(
        target=target, classes=getattr(target, "classes", ()), index=SizedIndex(counts)
    )
    return loader


class SizedIndex:
    """An index of 100 samples with these counts of classes."""

    def __init__(self, counts: list[float] | None) -> None:
        self.counts = counts

    def class_counts(self) -> np.ndarray:
        return np.array(self.counts, float)

    def __len__(self) -> int:
        return 100


def labels(count: int) -> Labels:
    return Labels(np.zeros(0, np.int64), names(count))


TARGETS: dict[str, Target] = {
    "classification": labels(7),
    "multilabel": SeveralLabels(np.zeros((0, 7), np.float32), names(7)),
    "regression": Numbers(np.zeros((0, 2), np.float32), ("age", "size")),
    "restoration": TargetImages(),
    "segmentation": Masks(names(4), ignore_index=255),
}


def image_pair() -> tuple[Tensor, Tensor]:
    """Outputs and targets, (2, 3, 13, 17): targets in [0, 1], outputs partly outside of it."""
    steps = torch.arange(2 * 3 * 13 * 17, dtype=torch.float64).reshape(2, 3, 13, 17)
    targets = 0.5 + 0.5 * torch.sin(0.37 * steps)
    noise = torch.tensor([0.05, 0.3], dtype=torch.float64).view(2, 1, 1, 1)
    return (targets + noise * torch.cos(1.7 * steps)).float(), targets.float()


# From torchmetrics 1.9.0: structural_similarity_index_measure and peak_signal_noise_ratio with
# data_range=1.0 and reduction="none", on image_pair() with the outputs clamped to [0, 1].
TORCHMETRICS_SSIM = [0.9694901704788208, 0.5039369463920593]
TORCHMETRICS_PSNR = [29.514734268188477, 14.78222370147705]


def logits_and_labels(num_images: int = 12, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(num_images, num_classes, generator=generator)
    return outputs, torch.randint(num_classes, (num_images,), generator=generator)


# build_task


def test_build_task_passes_on_the_config() -> None:
    task = build_task(
        config("classification", "cross_entropy", label_smoothing=0.1), data_with(labels(7))
    )
    assert isinstance(task, Classification)
    assert task.label_smoothing == 0.1
    assert task.metric_names == ("loss", "top1", "top5")

    outputs, targets = image_pair()
    images = data_with(TargetImages())
    wide = build_task(config("restoration", "l1", value_range=[-1.0, 1.0]), images)
    assert isinstance(wide, Restoration)
    assert wide.loss(outputs, targets).item() == pytest.approx((outputs - targets).abs().mean())
    # A range twice as large, the same differences: 20 log10(2) dB more.
    unit = build_task(config("restoration", "l1", value_range=[0.0, 1.0]), images)
    inside = targets.lerp(outputs, 0.1).clamp(0, 1)
    gain = wide.sums(inside, targets)[2] - unit.sums(inside, targets)[2]
    assert gain.item() == pytest.approx(2 * 20 * math.log10(2), abs=1e-4)


UNIT = [0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "target", "message"),
    [
        (
            config("detection", "l1"),
            labels(7),
            "task.name=detection is unknown; use one of classification, multilabel",
        ),
        (
            config("classification", "l1"),
            labels(7),
            "task.loss=l1 is not for.*; use cross_entropy",
        ),
        (
            config("restoration", "mse", value_range=UNIT),
            TargetImages(),
            "task.loss=mse is not for.*; use charbonnier or l1",
        ),
        (
            config("multilabel", "l1"),
            TARGETS["multilabel"],
            "task.loss=l1 is not for multilabel; use bce",
        ),
        (
            config("regression", "bce"),
            TARGETS["regression"],
            "task.loss=bce is not for regression; use mse or l1",
        ),
        (
            config("segmentation", "bce"),
            TARGETS["segmentation"],
            "task.loss=bce is not for segmentation; use cross_entropy",
        ),
        (
            config("classification", "cross_entropy", 1.5),
            labels(7),
            r"label_smoothing=1.5 is not in \[0, 1\)",
        ),
        (
            config("segmentation", "cross_entropy", -1),
            TARGETS["segmentation"],
            r"label_smoothing=-1 is not in \[0, 1\)",
        ),
        (
            config("regression", "mse", 0.1),
            TARGETS["regression"],
            "task.label_smoothing=0.1 is not for task=regression; use 0",
        ),
        (
            config("restoration", "l1", value_range=[1.0, 0.0]),
            TargetImages(),
            r"value_range=\[1.0, 0.0\] is empty",
        ),
    ],
)
def test_errors_say_the_value_and_the_fix(wrong: Config, target: Target, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(wrong, data_with(target))


@pytest.mark.parametrize("data", TARGETS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_task_takes_its_kind_of_targets_only(name: str, data: str) -> None:
    loss = {"multilabel": "bce", "regression": "l1", "restoration": "l1"}.get(name, "cross_entropy")
    cfg, loader = config(name, loss, value_range=UNIT), data_with(TARGETS[data])
    if name == data:
        assert isinstance(build_task(cfg, loader), TASKS[name])
        return
    kind = TARGETS[data].kind
    message = f"^task={name} takes .*, but the targets of data=mine are {kind}; use task={data}$"
    with pytest.raises(ValueError, match=message):
        build_task(cfg, loader)


def test_a_task_sees_the_classes_and_says_how_many_outputs_it_needs() -> None:
    expected = {"classification": 7, "multilabel": 7, "regression": 2, "restoration": 3}
    expected["segmentation"] = 4
    for name, num_outputs in expected.items():
        loss = {"multilabel": "bce", "regression": "l1", "restoration": "l1"}.get(
            name, "cross_entropy"
        )
        task = build_task(config(name, loss, value_range=UNIT), data_with(TARGETS[name]))
        assert task.num_outputs == num_outputs


class Ordinal(Task):
    """A user's own: how far the predicted class is from the true one, with a sum per class."""

    takes = "labels"
    best_metric = "closeness"
    metric_names = ("loss", "closeness")

    def __init__(self, num_classes: int) -> None:
        self.num_outputs, self.num_sums = num_classes, 2 + num_classes

    @classmethod
    def from_config(cls, cfg: Config, loader: Loader) -> "Ordinal":
        return cls(len(loader.classes))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=1) - targets).abs().float().mean()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        distances = (outputs.argmax(dim=1) - targets).abs()
        head = [len(targets), float(distances.sum())]
        return torch.cat([torch.tensor(head), distances.bincount(minlength=self.num_outputs)])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        count, distance, right = totals[:3].tolist()
        return {"loss": distance / count, "closeness": right / count}


def test_an_own_task_is_a_class_and_a_line(monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "ordinal", Ordinal)
    task = build_task(config("ordinal", "distance"), data_with(labels(7)))
    assert task.num_outputs == 7
    outputs, targets = logits_and_labels()
    parts = loader_of((outputs[:5], targets[:5]), (outputs[5:], targets[5:]))
    totals, _ = evaluate(Probe(), task, parts)
    assert totals.shape == (9,)
    assert task.metrics(totals)["loss"] == pytest.approx(task.loss(outputs, targets).item())
    assert task.show(torch.zeros(2, 1, 4, 4), outputs, targets).keys() == {"input"}
    with pytest.raises(
        ValueError, match="^task=ordinal takes labels, but .* are masks; use task=seg"
    ):
        build_task(config("ordinal", "distance"), data_with(TARGETS["segmentation"]))


# loss.weights


def weighted(name: str, weights: Any, counts: list[float] | None = None) -> Task:
    cfg = config(name, "bce" if name == "multilabel" else "cross_entropy", value_range=UNIT)
    cfg.loss.weights = weights
    target = {
        "classification": labels(3),
        "multilabel": SeveralLabels(np.zeros((0, 3), np.float32), names(3)),
        "segmentation": Masks(names(3), 255),
    }[name]
    return build_task(cfg, data_with(target, counts))


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_automatic_weights_give_each_class_the_same_share(name: str) -> None:
    counts = [60.0, 30.0, 10.0]
    task: Any = weighted(name, "auto", counts)
    weights = np.array(task.weights.weights)
    assert weights * counts == pytest.approx([100 / 3] * 3)  # and on average a weight of 1
    absent: Any = weighted(name, "auto", [75.0, 0.0, 25.0])
    assert absent.weights.weights == pytest.approx([50 / 75, 1, 2])


def test_automatic_weights_of_several_labels_balance_present_and_absent() -> None:
    everywhere: Any = weighted("multilabel", "auto", [100.0, 50.0, 20.0])
    assert everywhere.weights.weights == [1, 1, 4]
    task: Any = weighted("multilabel", "auto", [50.0, 10.0, 0.0])
    assert task.weights.weights == [1, 9, 1]
    outputs, targets = torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]])
    assert task.loss(outputs, targets).item() == pytest.approx((1 + 9 + 1) / 3 * math.log(2))


def test_a_weight_multiplies_the_loss_of_its_class() -> None:
    outputs = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2])
    plain = Classification(names(3))
    for number, weight in enumerate([1.0, 0.5, 4.0]):
        part = slice(number, number + 1)
        loss = weighted("classification", [1, 0.5, 4]).loss(outputs[part], targets[part])
        assert loss.item() == pytest.approx(
            weight * plain.loss(outputs[part], targets[part]).item()
        )
    masks = torch.tensor([[[0, 1, 255]]])
    pixels = torch.zeros(1, 3, 1, 3)
    loss = weighted("segmentation", [1, 0.5, 4]).loss(pixels, masks)
    assert loss.item() == pytest.approx(1.5 * math.log(3) / 2)


@pytest.mark.parametrize("weights", [[1, 2], "many", 3, [1, 2, -1]])
def test_weights_that_do_not_fit_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="loss.weights=.* is not for 3 classes; use null, auto or"):
        weighted("classification", weights)


@pytest.mark.parametrize("name", ["regression", "restoration"])
def test_weights_need_classes(name: str) -> None:
    cfg = config(name, "l1", value_range=UNIT)
    cfg.loss.weights = "auto"
    with pytest.raises(ValueError, match=f"loss.weights=auto weighs classes, but task={name} has"):
        build_task(cfg, data_with(TARGETS[name]))


def test_names_of_metrics() -> None:
    assert Classification(names(6)).metric_names == ("loss", "top1", "top5")
    assert Classification(names(5)).metric_names == ("loss", "top1")
    assert Classification.best_metric == "top1"
    assert Restoration.metric_names == ("loss", "psnr", "ssim")
    assert Restoration.best_metric == "psnr"


# classification


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_mean_over_the_batch(label_smoothing: float) -> None:
    outputs, targets = logits_and_labels()
    # Szegedy et al. 2016, section 7: the target's probability is mixed with the uniform one.
    log_probabilities = outputs - outputs.exp().sum(dim=1, keepdim=True).log()
    right = log_probabilities[torch.arange(12), targets]
    mixed = (1 - label_smoothing) * right + label_smoothing * log_probabilities.mean(dim=1)

    task = Classification(names(7), "cross_entropy", label_smoothing)
    loss = task.loss(outputs, targets)
    assert loss.shape == ()
    torch.testing.assert_close(loss, -mixed.mean())
    torch.testing.assert_close(
        task.sums(outputs, targets)[1], -mixed.double().sum(), rtol=1e-6, atol=0
    )


def test_top1_and_top5_count_hits() -> None:
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    targets = torch.tensor([6, 2, 1, 5])
    task = Classification(names(7))
    metrics = task.metrics(task.sums(outputs, targets))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)


@pytest.mark.parametrize("num_classes", [1, 3, 5])
def test_with_up_to_five_classes_there_is_no_top5(num_classes: int) -> None:
    """It would be 1 whatever the model says."""
    outputs, targets = logits_and_labels(num_images=8, num_classes=num_classes)
    task = Classification(names(num_classes))
    metrics = task.metrics(task.sums(outputs, targets))
    assert metrics.keys() == {"loss", "top1"}
    assert metrics["loss"] == pytest.approx(task.loss(outputs, targets).item())
    assert metrics["top1"] == (outputs.argmax(dim=1) == targets).double().mean().item()


# restoration


def test_l1_and_charbonnier_follow_their_definitions() -> None:
    outputs, targets = image_pair()
    difference = (outputs - targets).double()
    l1 = Restoration("l1").loss(outputs, targets)
    charbonnier = Restoration("charbonnier").loss(outputs, targets)
    assert l1.shape == charbonnier.shape == ()
    assert l1.item() == pytest.approx(difference.abs().mean().item(), rel=1e-6)
    expected = (difference**2 + 0.001**2).sqrt().mean().item()
    assert charbonnier.item() == pytest.approx(expected, rel=1e-6)
    assert charbonnier.item() != pytest.approx(l1.item(), rel=1e-6)


@pytest.mark.parametrize("loss", ["l1", "charbonnier"])
def test_the_gradient_is_finite_where_images_are_equal(loss: str) -> None:
    outputs = torch.full((1, 1, 6, 6), 0.5, requires_grad=True)
    Restoration(loss).loss(outputs, outputs.detach()).backward()
    assert outputs.grad is not None
    assert torch.isfinite(outputs.grad).all()


@pytest.mark.parametrize("loss", ["l1", "charbonnier"])
def test_half_precision_targets_are_compared_in_float32(loss: str) -> None:
    outputs, targets = (images.bfloat16() for images in image_pair())
    task = Restoration(loss)
    assert torch.equal(task.loss(outputs, targets), task.loss(outputs.float(), targets.float()))


def test_psnr_and_ssim_match_torchmetrics_for_each_image() -> None:
    outputs, targets = image_pair()
    task = Restoration("l1")
    for image in (0, 1):
        part = slice(image, image + 1)
        metrics = task.metrics(task.sums(outputs[part], targets[part]))
        assert metrics["psnr"] == pytest.approx(TORCHMETRICS_PSNR[image], abs=1e-4)
        assert metrics["ssim"] == pytest.approx(TORCHMETRICS_SSIM[image], abs=2e-6)


def test_psnr_and_ssim_do_not_depend_on_the_value_range() -> None:
    outputs, targets = image_pair()
    unit = Restoration("l1", 0.0, 1.0).sums(outputs, targets)
    wide = Restoration("l1", -1.0, 1.0).sums(2 * outputs - 1, 2 * targets - 1)
    torch.testing.assert_close(wide[2:], unit[2:], rtol=1e-5, atol=0)
    torch.testing.assert_close(wide[1], 2 * unit[1], rtol=1e-5, atol=0)


def test_metrics_clamp_the_outputs_and_the_loss_does_not() -> None:
    outputs, targets = image_pair()
    task = Restoration("l1")
    raw, clamped = task.sums(outputs, targets), task.sums(outputs.clamp(0, 1), targets)
    torch.testing.assert_close(raw[2:], clamped[2:])
    assert raw[1] > clamped[1]


def test_identical_images_have_100_db_and_ssim_one() -> None:
    _, targets = image_pair()
    metrics = Restoration("l1").metrics(Restoration("l1").sums(targets, targets))
    assert metrics == pytest.approx({"loss": 0.0, "psnr": 100.0, "ssim": 1.0})


def test_ssim_keeps_float32_under_autocast() -> None:
    outputs, targets = image_pair()
    task = Restoration("charbonnier")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = task.sums(outputs, targets)
    assert torch.equal(inside, task.sums(outputs, targets))


def test_ssim_refuses_images_smaller_than_its_border() -> None:
    task = Restoration("l1")
    smallest = torch.rand(1, 1, 6, 6)
    assert torch.isfinite(task.sums(smallest, 1 - smallest)).all()
    with pytest.raises(ValueError, match="images have 5x9; use 6x6 or more"):
        task.sums(torch.rand(1, 1, 5, 9), torch.rand(1, 1, 5, 9))


def test_restoration_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match=r"outputs have shape \(2, 1, 8, 8\), but targets \(2, 3,"):
        Restoration("l1").loss(torch.rand(2, 1, 8, 8), torch.rand(2, 3, 8, 8))


# both


def several_labels(num_images: int = 12, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(num_images, num_classes, generator=generator) < 0.4).float()
    return 2 * torch.randn(num_images, num_classes, generator=generator) + targets, targets


def numbers(num_images: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randn(num_images, 2, generator=generator) * torch.tensor([3.0, 0.1]) + 20
    return targets + torch.randn(num_images, 2, generator=generator), targets


def masks(num_images: int = 6, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(num_classes, (num_images, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * torch.randn(num_images, num_classes, 9, 7, generator=generator), targets


EXAMPLES: list[tuple[Task, tuple[Tensor, Tensor]]] = [
    (Classification(names(7), label_smoothing=0.1), logits_and_labels()),
    (Classification(names(7), weights=[1.0, 2, 3, 4, 5, 6, 0]), logits_and_labels()),
    (Restoration("charbonnier"), tuple(torch.cat([part] * 3) for part in image_pair())),  # type: ignore[list-item]
    (Restoration("l1", -1.0, 1.0), image_pair()),
    (MultiLabel(names(4), weights=[1.0, 2, 3, 4]), several_labels()),
    (Regression(("a", "b")), numbers()),
    (Regression(("a", "b"), "l1"), numbers()),
    (Segmentation(4, label_smoothing=0.1, ignore_index=255), masks()),
    (Segmentation(4, ignore_index=255, weights=[1.0, 2, 3, 4]), masks()),
]
IDS = [
    "classes",
    "weights",
    "images",
    "l1",
    "several",
    "numbers",
    "numbers-l1",
    "masks",
    "mask-weights",
]
each_task = pytest.mark.parametrize(("task", "batch"), EXAMPLES, ids=IDS)


@each_task
def test_sums_of_unequal_batches_add_up(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    outputs, targets = batch
    whole = task.sums(outputs, targets)
    assert whole.dtype == torch.float64
    assert whole.shape == (task.num_sums,)
    assert whole[0] == len(outputs)
    parts = task.sums(outputs[:1], targets[:1]) + task.sums(outputs[1:], targets[1:])
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)


@each_task
def test_the_loss_is_the_mean_of_the_sums(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    sums = task.sums(*batch)
    torch.testing.assert_close(task.loss(*batch).double(), sums[1] / sums[0], rtol=1e-6, atol=0)


@each_task
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_scored_in_float32(
    task: Task, batch: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    outputs, targets = batch[0].to(dtype), batch[1]
    assert task.loss(outputs, targets).dtype == torch.float32
    assert torch.equal(task.loss(outputs, targets), task.loss(outputs.float(), targets))
    assert torch.equal(task.sums(outputs, targets), task.sums(outputs.float(), targets))


@each_task
def test_sums_read_no_value_from_the_device(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    """Tensors on the meta device have no values, so that any `.item()` fails."""
    outputs, targets = (part.to("meta") for part in batch)
    assert task.sums(outputs, targets).device.type == "meta"
    assert task.loss(outputs, targets).device.type == "meta"


@each_task
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sums_do_not_wait_for_cuda(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    outputs, targets = (part.cuda() for part in batch)
    task.sums(outputs, targets)  # the first call may wait to load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = task.sums(outputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sums.device == outputs.device
    torch.testing.assert_close(sums.cpu(), task.sums(*batch), rtol=1e-5, atol=1e-4)


@each_task
def test_metrics_of_added_up_sums_are_those_of_the_whole(
    task: Task, batch: tuple[Tensor, Tensor]
) -> None:
    outputs, targets = batch
    whole = task.metrics(task.sums(outputs, targets))
    assert tuple(whole) == task.metric_names
    assert task.best_metric in whole
    assert all(math.isfinite(value) for value in whole.values())
    parts = [task.sums(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))]
    assert task.metrics(torch.stack(parts).sum(dim=0)) == pytest.approx(whole, rel=1e-6)
    with pytest.raises(ValueError, match="totals have 0 images; evaluate at least one"):
        task.metrics(torch.zeros(task.num_sums, dtype=torch.float64))


@each_task
def test_outputs_of_a_model_that_does_not_fit_are_refused(
    task: Task, batch: tuple[Tensor, Tensor]
) -> None:
    """Of too many numbers, or of images where numbers are needed and the other way round."""
    outputs, targets = batch
    more = torch.cat([outputs, outputs[:, :1]], dim=1)
    other = outputs.mean(dim=(2, 3)) if outputs.ndim == 4 else outputs[..., None, None]
    for wrong in (more, other):
        for call in (task.loss, task.sums):
            with pytest.raises(ValueError, match="outputs have shape .*; use a model"):
                call(wrong, targets)


@each_task
def test_a_task_shows_its_batch(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    outputs, targets = (part[:3] for part in batch)
    for channels in (1, 3):
        inputs = torch.rand(len(outputs), channels, 9, 7)
        pictures = task.show(inputs, outputs.bfloat16(), targets)
        pictures |= task.charts(task.sums(outputs, targets))
        assert pictures
        for name, images in pictures.items():
            assert images.ndim == 4
            assert images.shape[0] == (1 if name == "confusion" else len(outputs))
            assert images.shape[1] in (1, 3)
            assert images.dtype == torch.float32
            assert 0 <= images.min()
            assert images.max() <= 1
    expected = {
        Classification: {"predictions", "confusion"},
        MultiLabel: {"predictions"},
        Regression: {"predictions"},
        Restoration: {"input", "output", "target"},
        Segmentation: {"image", "mask", "prediction"},
    }
    assert set(pictures) == expected[type(task)]


def test_masks_are_shown_in_the_colours_of_their_classes() -> None:
    task, (outputs, targets) = Segmentation(4, ignore_index=255), masks()
    pictures = task.show(torch.rand(6, 3, 9, 7), outputs, targets)
    colours = torch.from_numpy(task.palette).float() / 255
    assert len({tuple(colour) for colour in task.palette.tolist()}) == 4
    guesses = outputs.argmax(dim=1)
    for index in range(4):
        shown = pictures["mask"].permute(0, 2, 3, 1)[targets == index]
        assert torch.equal(shown, colours[index].expand_as(shown))
        shown = pictures["prediction"].permute(0, 2, 3, 1)[guesses == index]
        assert torch.equal(shown, colours[index].expand_as(shown))
    assert (pictures["mask"].permute(0, 2, 3, 1)[targets == 255] == 1).all()


def test_the_colour_of_the_predicted_name_says_whether_it_is_right() -> None:
    outputs = torch.eye(2)
    task = Classification(("täx", "犬"))
    shown = task.show(torch.zeros(2, 1, 8, 8), outputs, torch.tensor([0, 0]))["predictions"]
    red, green = shown[:, 0], shown[:, 1]
    assert (green > red).flatten(1).any(dim=1).tolist() == [True, False]
    assert (red > green).flatten(1).any(dim=1).tolist() == [False, True]


def test_many_classes_have_no_confusion_matrix() -> None:
    """Its sums would be larger than the model."""
    assert Classification(names(501)).num_sums == 4
    outputs, targets = logits_and_labels(num_classes=501)
    task = Classification(names(501))
    assert task.sums(outputs, targets).shape == (4,)
    assert task.charts(task.sums(outputs, targets)) == {}


# against other libraries


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix

    outputs, targets = logits_and_labels(200)
    task = Classification(names(7))
    matrix = task.sums(outputs, targets)[-49:].view(7, 7)
    expected = confusion_matrix(targets, outputs.argmax(dim=1), labels=range(7))
    assert np.array_equal(matrix.numpy(), expected)


@pytest.mark.parametrize("num_images", [5, 60, 3000])
@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
def test_average_precision_is_that_of_scikit_learn(num_images: int, scale: float) -> None:
    """Of scores rounded to the bins exactly, of others within 0.005, as long as logits differ by some bins."""
    from sklearn.metrics import average_precision_score

    outputs, targets = several_labels(num_images)
    outputs = outputs * scale
    task = MultiLabel(names(4))
    ours = task.metrics(task.sums(outputs, targets))["map"]
    occurs = targets.sum(dim=0) > 0

    def expected(scores: Tensor) -> float:
        return average_precision_score(targets[:, occurs], scores[:, occurs], average="macro")

    bins = ((outputs - LOWEST) * BINS_PER_LOGIT).floor().clamp(0, NUM_BINS - 1)
    assert ours == pytest.approx(expected(bins), abs=1e-9)
    if scale == 2:
        assert ours == pytest.approx(expected(outputs), abs=0.005)


def test_f1_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    outputs, targets = several_labels(500)
    outputs[0] = 0.0  # a probability of exactly one half counts as positive
    outputs[1, 0] = -1e-6
    task = MultiLabel(names(4))
    expected = f1_score(targets, outputs >= 0, average="micro")
    assert task.metrics(task.sums(outputs, targets))["f1"] == pytest.approx(expected, abs=1e-12)


def test_a_class_that_no_image_has_does_not_count_in_the_mean() -> None:
    outputs, targets = several_labels(50)
    without = targets.clone()
    without[:, 0] = 0
    four, three = MultiLabel(names(4)), MultiLabel(names(3))
    assert four.metrics(four.sums(outputs, without))["map"] == pytest.approx(
        three.metrics(three.sums(outputs[:, 1:], targets[:, 1:]))["map"]
    )
    none = four.metrics(four.sums(outputs, torch.zeros_like(targets)))
    assert (none["map"], none["f1"]) == (0, 0)


def test_outputs_that_are_no_numbers_do_not_stop_the_sums() -> None:
    outputs, targets = several_labels(4)
    outputs[0, 0], outputs[1, 1], outputs[2, 2] = math.nan, math.inf, -math.inf
    task = MultiLabel(names(4))
    assert task.sums(outputs, targets)[2:].sum() == 4 * 4 + targets.sum()


def test_mae_and_r2_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score

    outputs, targets = numbers(300)
    task = Regression(("a", "b"))
    metrics = task.metrics(task.sums(outputs, targets))
    assert metrics["mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-6)
    assert metrics["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-6)
    constant = torch.full((5, 2), 3.0)
    for guess, r2 in ((constant, 1.0), (constant + 1, 0.0)):
        assert task.metrics(task.sums(guess, constant))["r2"] == r2 == r2_score(constant, guess)


def test_miou_and_accuracy_are_those_of_scikit_learn_and_torchmetrics() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score
    from torchmetrics.classification import MulticlassJaccardIndex

    outputs, targets = masks()
    task = Segmentation(4, ignore_index=255)
    metrics = task.metrics(task.sums(outputs, targets))
    counted, guesses = targets != 255, outputs.argmax(dim=1)
    true, guess = targets[counted], guesses[counted]
    assert metrics["miou"] == pytest.approx(jaccard_score(true, guess, average="macro"), rel=1e-9)
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(true, guess), rel=1e-9)
    torchmetric = MulticlassJaccardIndex(4, ignore_index=255)
    assert metrics["miou"] == pytest.approx(float(torchmetric(guesses, targets)), rel=1e-6)


def test_a_class_in_neither_masks_nor_predictions_does_not_count() -> None:
    outputs, targets = masks()
    wide = torch.cat([outputs, torch.full_like(outputs[:, :2], -100)], dim=1)
    four, six = Segmentation(4, ignore_index=255), Segmentation(6, ignore_index=255)
    metrics = [t.metrics(t.sums(o, targets)) for t, o in ((four, outputs), (six, wide))]
    assert metrics[0]["miou"] == pytest.approx(metrics[1]["miou"], rel=1e-12)


def test_ignored_pixels_have_no_loss_and_no_gradient() -> None:
    outputs, targets = masks()
    outputs.requires_grad_()
    loss = Segmentation(4, ignore_index=255).loss(outputs, targets)
    loss.backward()
    assert outputs.grad is not None
    ignored = (targets == 255)[:, None].expand_as(outputs)
    assert (outputs.grad[ignored] == 0).all()
    assert (outputs.grad[~ignored] != 0).any()
    assert torch.isfinite(outputs.grad).all()


def test_predictions_are_rows_and_images() -> None:
    outputs, _ = several_labels(3)
    task = MultiLabel(names(4))
    assert task.columns == names(4)
    assert task.rows(outputs)[1] == pytest.approx(outputs[1].sigmoid().tolist())
    outputs, _ = numbers(3)
    assert Regression(("a", "b")).columns == ("a", "b")
    assert Regression(("a", "b")).rows(outputs) == [tuple(row) for row in outputs.tolist()]
    outputs, _ = masks()
    images = Segmentation(4).images(outputs)
    assert (images.dtype, images.shape) == (np.uint8, (6, 9, 7))
    assert np.array_equal(images, outputs.argmax(dim=1))
    assert Segmentation(4).palette.shape == (4, 3)
    wide = torch.zeros(1, 300, 2, 2)
    wide[:, 299] = 1
    assert Segmentation(300).images(wide).tolist() == [[[299, 299], [299, 299]]]


def _sums_of_rank(rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for number, (task, (outputs, targets)) in enumerate(EXAMPLES):
        shard = slice(0, 1) if rank == 0 else slice(1, None)  # unequal shards
        totals, _ = evaluate(Probe(), task, loader_of((outputs[shard], targets[shard])))
        dist.all_reduce(totals)
        torch.save(totals, f"{folder}/{number}-{rank}.pt")
    dist.destroy_process_group()


def test_sums_over_ranks_with_unequal_shards_are_those_of_one_process(tmp_path) -> None:
    torch.multiprocessing.spawn(_sums_of_rank, (2, free_port(), str(tmp_path)), nprocs=2)
    for number, (task, (outputs, targets)) in enumerate(EXAMPLES):
        expected = task.metrics(task.sums(outputs, targets))
        for rank in (0, 1):
            totals = torch.load(tmp_path / f"{number}-{rank}.pt")
            assert task.metrics(totals) == pytest.approx(expected, rel=1e-6)


# evaluate


def loader_of(*batches: tuple[Tensor, Tensor], device: str = "cpu") -> Loader:
    """A loader as far as evaluate() sees it: batches and the device on which they lie."""

    class ListLoader(list[tuple[Tensor, Tensor]]):
        pass

    loader: Any = ListLoader(batches)
    loader.device = torch.device(device)
    loader.in_channels, loader.output_size = 3, (24, 32)
    return loader


class Probe(nn.Module):
    """Returns its inputs and records the modes in which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Dropout(0.5)
        self.was_training: list[bool] = []
        self.had_gradients: list[bool] = []
        self.was_autocast: list[torch.dtype | None] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.was_training.append(self.child.training)
        self.had_gradients.append(torch.is_grad_enabled())
        autocasts = torch.is_autocast_enabled(inputs.device.type)
        dtype = torch.get_autocast_dtype(inputs.device.type) if autocasts else None
        self.was_autocast.append(dtype)
        return self.child(inputs)


@each_task
def test_evaluate_sums_over_the_loader(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    outputs, targets = batch
    loader = loader_of((outputs[:1], targets[:1]), (outputs[1:], targets[1:]))
    totals, _ = evaluate(Probe(), task, loader)
    assert totals.dtype == torch.float64
    torch.testing.assert_close(totals, task.sums(outputs, targets), rtol=1e-6, atol=0)


def test_evaluate_hands_back_images_of_the_first_batch() -> None:
    outputs, targets = logits_and_labels(40)
    loader = loader_of((outputs[:20], targets[:20]), (outputs[20:], targets[20:]))
    _, shown = evaluate(Probe(), Classification(names(7)), loader)
    for part, expected in zip(shown, (outputs, outputs, targets), strict=True):
        assert torch.equal(part, expected[:16])
        assert part.untyped_storage().nbytes() == part.nbytes  # no view of the whole batch
    assert evaluate(Probe(), Classification(names(7)), loader_of())[1] == ()


def test_evaluate_runs_in_evaluation_mode_and_without_gradients() -> None:
    model = Probe()
    evaluate(model, Classification(names(7)), loader_of(logits_and_labels()))
    assert (model.was_training, model.had_gradients) == ([False], [False])
    assert torch.is_grad_enabled()


def test_evaluate_runs_in_the_precision_asked_for() -> None:
    model, loader = Probe(), loader_of(logits_and_labels())
    evaluate(model, Classification(names(7)), loader)
    for dtype in (torch.bfloat16, torch.float16):
        evaluate(model, Classification(names(7)), loader, precision=torch.autocast("cpu", dtype))
    assert model.was_autocast == [None, torch.bfloat16, torch.float16]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("num_batches", [0, 1, 2, 5])
def test_evaluate_calls_the_model_so_often_and_counts_every_image_once(num_batches: int) -> None:
    outputs, targets = logits_and_labels()
    loader = loader_of((outputs[:7], targets[:7]), (outputs[7:], targets[7:]))
    model, task = Probe(), Classification(names(7))
    totals, _ = evaluate(model, task, loader, num_batches=num_batches)
    assert model.was_training == [False] * max(2, num_batches)
    assert model.had_gradients == [False] * max(2, num_batches)
    torch.testing.assert_close(totals, task.sums(outputs, targets), rtol=1e-6, atol=0)


def test_a_rank_without_a_batch_calls_the_model_as_often_as_the_others() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), Probe())
    totals, shown = evaluate(model, Restoration("l1"), loader_of(), num_batches=2)
    assert model[1].was_training == [False, False]
    assert (totals.tolist(), shown) == ([0, 0, 0, 0], ())


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_restores_the_mode_even_after_an_error(training: bool) -> None:
    model = Probe().train(training)
    evaluate(model, Classification(names(7)), loader_of(logits_and_labels()))
    assert (model.training, model.child.training) == (training, training)

    outputs, _ = logits_and_labels()
    with pytest.raises(ValueError, match="outputs have shape"):
        evaluate(
            model, Classification(names(7)), loader_of((outputs, torch.zeros(3, dtype=torch.int64)))
        )
    assert len(model.was_training) == 2
    assert (model.training, model.child.training) == (training, training)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store")), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_evaluate_calls_a_wrapped_model_without_its_wrapper(wrap: Any, monkeypatch) -> None:
    def fail(*unused: Any) -> Tensor:
        raise AssertionError("a collective that the other ranks may not join")

    monkeypatch.setattr(wrap, "forward", fail)
    outputs, targets = logits_and_labels()
    model = nn.Linear(7, 7)
    expected = Classification(names(7)).sums(model(outputs), targets)
    totals, _ = evaluate(wrap(model), Classification(names(7)), loader_of((outputs, targets)))
    assert torch.equal(totals, expected)


def test_evaluate_calls_the_whole_of_a_net_that_has_a_layer_called_module() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Probe()

        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * self.module(inputs)

    outputs, targets = logits_and_labels()
    totals, _ = evaluate(Doubling(), Classification(names(7)), loader_of((outputs, targets)))
    assert torch.equal(totals, Classification(names(7)).sums(2 * outputs, targets))


def test_totals_can_be_changed_in_place_afterwards() -> None:
    """As dist.all_reduce does; tensors made in inference mode refuse that."""
    totals, _ = evaluate(Probe(), Classification(names(7)), loader_of(logits_and_labels()))
    totals += 1
    assert totals[0] == 13


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_without_rows_gives_zeros_on_its_device(device: str) -> None:
    totals, _ = evaluate(Probe(), Restoration("l1"), loader_of(device=device))
    assert totals.device.type == device
    assert totals.dtype == torch.float64
    assert totals.tolist() == [0, 0, 0, 0]
