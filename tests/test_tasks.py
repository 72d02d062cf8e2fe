"""The tasks: losses and metrics agree with their definitions, and sums add up exactly."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import Config, DataConfig, TaskConfig
from loaders import Loader
from runtime import evaluate
from tasks import Classification, Restoration, Task, build_task


def config(name: str, loss: str, label_smoothing: float = 0.0, **data: Any) -> Config:
    task = TaskConfig(name=name, loss=loss, label_smoothing=label_smoothing)
    return Config(task=task, data=DataConfig(**data))


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
    task = build_task(config("classification", "cross_entropy", label_smoothing=0.1), 7)
    assert isinstance(task, Classification)
    assert task.label_smoothing == 0.1
    assert task.metric_names == ("loss", "top1", "top5")

    outputs, targets = image_pair()
    wide = build_task(config("restoration", "l1", value_range=[-1.0, 1.0]), None)
    assert isinstance(wide, Restoration)
    assert wide.loss(outputs, targets).item() == pytest.approx((outputs - targets).abs().mean())
    # A range twice as large, the same differences: 20 log10(2) dB more.
    unit = build_task(config("restoration", "l1", value_range=[0.0, 1.0]), None)
    inside = targets.lerp(outputs, 0.1).clamp(0, 1)
    gain = wide.sums(inside, targets)[2] - unit.sums(inside, targets)[2]
    assert gain.item() == pytest.approx(2 * 20 * math.log10(2), abs=1e-4)


UNIT = [0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "num_classes", "message"),
    [
        (
            config("detection", "l1"),
            7,
            "task.name=detection is unknown; use classification or rest",
        ),
        (config("classification", "l1"), 7, "task.loss=l1 is not for.*; use cross_entropy"),
        (
            config("restoration", "mse", value_range=UNIT),
            None,
            "task.loss=mse is not for.*; use charbonnier or l1",
        ),
        (
            config("classification", "cross_entropy", 1.5),
            7,
            r"label_smoothing=1.5 is not in \[0, 1\)",
        ),
        (
            config("restoration", "l1", value_range=[1.0, 0.0]),
            None,
            r"value_range=\[1.0, 0.0\] is empty",
        ),
        (
            config("classification", "cross_entropy"),
            None,
            "needs class labels, but the targets of this data are images; use task=restoration",
        ),
        (
            config("restoration", "l1", value_range=UNIT),
            7,
            "needs target images, but this data has labels of 7 classes; use task=classification",
        ),
    ],
)
def test_errors_say_the_value_and_the_fix(
    wrong: Config, num_classes: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(wrong, num_classes)


def test_names_of_metrics() -> None:
    assert Classification(6).metric_names == ("loss", "top1", "top5")
    assert Classification(5).metric_names == ("loss", "top1")
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

    task = Classification(7, "cross_entropy", label_smoothing)
    loss = task.loss(outputs, targets)
    assert loss.shape == ()
    torch.testing.assert_close(loss, -mixed.mean())
    torch.testing.assert_close(
        task.sums(outputs, targets)[1], -mixed.double().sum(), rtol=1e-6, atol=0
    )


def test_top1_and_top5_count_hits() -> None:
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    targets = torch.tensor([6, 2, 1, 5])
    task = Classification(7)
    metrics = task.metrics(task.sums(outputs, targets))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)


@pytest.mark.parametrize("num_classes", [1, 3, 5])
def test_with_up_to_five_classes_there_is_no_top5(num_classes: int) -> None:
    """It would be 1 whatever the model says."""
    outputs, targets = logits_and_labels(num_images=8, num_classes=num_classes)
    task = Classification(num_classes)
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

EXAMPLES: list[tuple[Task, tuple[Tensor, Tensor]]] = [
    (Classification(7, label_smoothing=0.1), logits_and_labels()),
    (Restoration("charbonnier"), tuple(torch.cat([part] * 3) for part in image_pair())),  # type: ignore[list-item]
    (Restoration("l1", -1.0, 1.0), image_pair()),
]
each_task = pytest.mark.parametrize(("task", "batch"), EXAMPLES, ids=["classes", "images", "l1"])


@each_task
def test_sums_of_unequal_batches_add_up(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    outputs, targets = batch
    whole = task.sums(outputs, targets)
    assert whole.dtype == torch.float64
    assert whole.shape == (len(task.metric_names) + 1,)
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
def test_metrics_divide_by_the_number_of_images(task: Task, batch: tuple[Tensor, Tensor]) -> None:
    totals = torch.tensor([4.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    assert task.metrics(totals) == dict(zip(task.metric_names, (0.5, 0.75, 0.25), strict=True))
    with pytest.raises(ValueError, match="totals have 0 images; evaluate at least one"):
        task.metrics(torch.zeros(4, dtype=torch.float64))


# evaluate


def loader_of(*batches: tuple[Tensor, Tensor], device: str = "cpu") -> Loader:
    """A loader as far as evaluate() sees it: batches and the device on which they lie."""

    class ListLoader(list[tuple[Tensor, Tensor]]):
        pass

    loader: Any = ListLoader(batches)
    loader.device = torch.device(device)
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
    totals = evaluate(Probe(), task, loader)
    assert totals.dtype == torch.float64
    torch.testing.assert_close(totals, task.sums(outputs, targets), rtol=1e-6, atol=0)


def test_evaluate_runs_in_evaluation_mode_and_without_gradients() -> None:
    model = Probe()
    evaluate(model, Classification(7), loader_of(logits_and_labels()))
    assert (model.was_training, model.had_gradients) == ([False], [False])
    assert torch.is_grad_enabled()


def test_evaluate_runs_in_the_precision_asked_for() -> None:
    model, loader = Probe(), loader_of(logits_and_labels())
    evaluate(model, Classification(7), loader)
    for dtype in (torch.bfloat16, torch.float16):
        evaluate(model, Classification(7), loader, precision=torch.autocast("cpu", dtype))
    assert model.was_autocast == [None, torch.bfloat16, torch.float16]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("num_batches", [0, 1, 2, 5])
def test_evaluate_calls_the_model_so_often_and_counts_every_image_once(num_batches: int) -> None:
    outputs, targets = logits_and_labels()
    loader = loader_of((outputs[:7], targets[:7]), (outputs[7:], targets[7:]))
    model, task = Probe(), Classification(7)
    totals = evaluate(model, task, loader, num_batches=num_batches)
    assert model.was_training == [False] * max(2, num_batches)
    assert model.had_gradients == [False] * max(2, num_batches)
    torch.testing.assert_close(totals, task.sums(outputs, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_restores_the_mode_even_after_an_error(training: bool) -> None:
    model = Probe().train(training)
    evaluate(model, Classification(7), loader_of(logits_and_labels()))
    assert (model.training, model.child.training) == (training, training)

    outputs, _ = logits_and_labels()
    with pytest.raises(RuntimeError, match="must match"):
        evaluate(model, Classification(7), loader_of((outputs, torch.zeros(3, dtype=torch.int64))))
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
    expected = Classification(7).sums(model(outputs), targets)
    assert torch.equal(
        evaluate(wrap(model), Classification(7), loader_of((outputs, targets))), expected
    )


def test_evaluate_calls_the_whole_of_a_net_that_has_a_layer_called_module() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Probe()

        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * self.module(inputs)

    outputs, targets = logits_and_labels()
    totals = evaluate(Doubling(), Classification(7), loader_of((outputs, targets)))
    assert torch.equal(totals, Classification(7).sums(2 * outputs, targets))


def test_totals_can_be_changed_in_place_afterwards() -> None:
    """As dist.all_reduce does; tensors made in inference mode refuse that."""
    totals = evaluate(Probe(), Classification(7), loader_of(logits_and_labels()))
    totals += 1
    assert totals[0] == 13


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def test_a_rank_without_rows_gives_zeros_on_its_device(device: str) -> None:
    totals = evaluate(Probe(), Restoration("l1"), loader_of(device=device))
    assert totals.device.type == device
    assert totals.dtype == torch.float64
    assert totals.tolist() == [0, 0, 0, 0]
