"""Augmentations of finished batches do what torchvision's functions do.

That they are the same with every backend, on any ranks and after any resume is in test_contract.py.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from conf.schema import DataConfig
from examples.invert import Invert
from loaders.augment import AUGMENTATIONS, OPERATIONS, active_augmentations
from loaders.rectangles import neutral_rows
from loaders.targets import Labels, Masks, MultiLabels, RegressionTargets, Target, TargetImages
from tests.helpers import refused
from tests.images import loaders_of, smooth

BY_NAME: dict[str, Any] = {type(a).__name__: a for a in AUGMENTATIONS}
COUNT, SIZE = 6, (20, 28)
TARGETS: dict[str, tuple[Target, Tensor]] = {
    "labels": (Labels(np.zeros(0), tuple("abcd")), torch.tensor([0, 1, 2, 3, 0, 1])),
    "several labels": (MultiLabels(np.zeros(0), tuple("ab")), torch.eye(COUNT)[:, :2]),
    "numbers": (RegressionTargets(np.zeros(0), ("x",)), torch.arange(COUNT)[:, None] * 1.5),
    "images": (TargetImages(size_factor=2), torch.rand(COUNT, 3, 40, 56)),
    "masks": (Masks(tuple("abcd"), 255), torch.randint(4, (COUNT, *SIZE))),
}


def some_images(channels: int = 3) -> Tensor:
    """(6, channels, 20, 28) in [0, 1]: smooth, one of them a constant."""
    images = np.stack([smooth(number, *SIZE) for number in range(COUNT)]) / 255.0
    images[3] = 0.2
    return torch.from_numpy(images).permute(0, 3, 1, 2).float()[:, [0, 1, 2, 0, 1][:channels]]


def drawn_rows(count: int = COUNT, /, **settings: Any) -> np.ndarray:
    rows, random = neutral_rows(np.arange(count)), np.random.default_rng(0)
    data = DataConfig(**settings)
    for augmentation in active_augmentations(data):
        augmentation.draw(
            rows, np.full((count, 2), 8), data, lambda name, num: random.random((count, num))
        )
    return rows


def augmented(name: str, images: Tensor, rows: np.ndarray, kind: str = "labels") -> Any:
    """Inputs and targets after `apply_to_both`."""
    target, values = TARGETS[kind]
    return BY_NAME[name].apply_to_both(images.clone(), values.clone(), rows, target)


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_affine_is_torchvisions(kind: str) -> None:
    rows, images, values = neutral_rows(np.arange(COUNT)), some_images(), TARGETS[kind][1]
    rows["angle"], rows["scale"] = [0, 30, -77.5, 176, 5, -5], [1, 1, 0.6, 1.7, 1.2, 1]

    def moved(tensors: Tensor, mode: str, fill: int = 0) -> Tensor:
        how = {"interpolation": v2.InterpolationMode(mode), "fill": [fill]}
        parts = zip(tensors, rows["angle"].tolist(), rows["scale"].tolist(), strict=True)
        return torch.stack([functional.affine(t, a, [0, 0], s, [0, 0], **how) for t, a, s in parts])

    inputs, targets = augmented("Affine", images, rows, kind)
    if kind == "masks":
        expected = moved(values[:, None], "nearest", fill=255)[:, 0]
        assert (targets == expected).float().mean() > 0.995  # ties
        assert set(targets.unique().tolist()) == {0, 1, 2, 3, 255}
        return
    for found, given in [(inputs, images), (targets, values)]:
        # torchvision mixes what it fills in by itself; the line where the image ends differs.
        ends = moved(torch.ones_like(given), "bilinear") < 1
        expected = moved(given, "bilinear").masked_fill(ends, 0)
        torch.testing.assert_close(found.masked_fill(ends, 0), expected, rtol=0, atol=1e-4)


def test_random_erasing_sets_the_papers_shares_to_the_mean() -> None:
    rows, images = drawn_rows(20_000, random_erasing=0.25), some_images() + 1
    results = augmented("RandomErasing", images, rows[:COUNT])[0]
    boxes = BY_NAME["RandomErasing"].boxes(rows[:COUNT], *SIZE)
    for image, result, (top, bottom, left, right) in zip(images, results, boxes, strict=True):
        image[:, top:bottom, left:right] = 0
        assert torch.equal(result, image)
    erased = rows[rows["erased_share"] > 0]
    assert len(erased) == pytest.approx(5000, rel=0.05)
    top, bottom, left, right = BY_NAME["RandomErasing"].boxes(erased, 200, 300).T
    assert (top.min(), bottom.max(), left.min(), right.max()) == (0, 200, 0, 300)
    share = (bottom - top) * (right - left) / (200 * 300)
    assert (share.min(), share.max()) == pytest.approx((0.02, 0.33), abs=0.01)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_operations_of_randaugment_are_torchvisions_and_alike_often(channels: int) -> None:
    """Of magnitude 9, with the signs that were drawn."""
    rows, images = drawn_rows(9000, randaugment=[2, 9]), some_images(channels)
    for drawn in rows["operations"][:, :2].T:
        assert np.bincount(drawn) == pytest.approx([1000] * 9, rel=0.1)
    rows = drawn_rows(120, randaugment=[1, 9])
    images = images.repeat(20, 1, 1, 1)
    changed = BY_NAME["RandAugment"].apply(images.clone(), rows)
    amounts = {"posterize": [7], "solarize": [0.7], "autocontrast": [], "equalize": []}
    operations, signs = rows["operations"][:, 0], np.sign(rows["amounts"][:, 0] - 1)
    assert {*signs[operations == 1]} == {-1, 1}
    for image, result, operation, sign in zip(images, changed, operations, signs, strict=True):
        name = OPERATIONS[operation]
        if channels == 5:
            image, result = image[:, None], result[:, None]
        given: Any = amounts.get(name, [1 + sign * 0.9 * 0.3])
        wanted = image if name == "identity" else getattr(functional, name)(image, *given)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-5)


def test_batches_take_other_factors_of_colour_each_as_torchvision_does() -> None:
    rows, images = drawn_rows(colour_jitter=[0.5, 0.5, 0.5]), some_images()
    changed = BY_NAME["ColourJitter"].apply(images.clone(), rows)
    for image, result, row in zip(images, changed, rows, strict=True):
        for name in ("brightness", "contrast", "saturation"):
            image = getattr(functional, f"adjust_{name}")(image, float(row[name]))
        torch.testing.assert_close(result, image, rtol=0, atol=1e-3)  # other weights of grey


def test_half_of_the_samples_are_cut_and_the_others_have_beta_distributed_weights() -> None:
    rows = drawn_rows(100_000, mixup=0.2, cutmix=1.0)
    is_cut = rows["cut_share"] > 0
    assert is_cut.mean() == pytest.approx(0.5, abs=0.01)
    assert (rows["weight"][is_cut] == 1).all()
    others = np.random.default_rng(1).beta(0.2, 0.2, 100_000)
    values = np.linspace(0.05, 0.95, 19)
    drawn, expected = (
        (x[:, None] < values).mean(axis=0) for x in (rows["weight"][~is_cut], others)
    )
    assert drawn == pytest.approx(expected, abs=0.01)


MIXTURES = [(kind, name) for kind in TARGETS for name in ("mixup", "cutmix")]
MIXTURES.remove(("masks", "mixup"))  # which is refused


@pytest.mark.parametrize(("kind", "name"), MIXTURES)
def test_targets_are_mixed_as_inputs_are(kind: str, name: str) -> None:
    rows, images, values = drawn_rows(**{name: 1.0}), some_images(), TARGETS[kind][1]
    mixed, targets = augmented("Mixing", images, rows, kind)
    own = torch.from_numpy(rows["weight"].copy()).view(-1, 1, 1, 1).repeat(1, 1, *SIZE)
    boxes = BY_NAME["Mixing"].boxes(rows, *SIZE)
    for share, (top, bottom, left, right) in zip(own, boxes.tolist(), strict=True):
        share[:, top:bottom, left:right] = 0
    assert ((own == 0).any() and (own == 1).any()) == (name == "cutmix")
    torch.testing.assert_close(mixed, own * images + (1 - own) * images.roll(3, 0))
    if kind == "masks":
        own = own[:, 0].long()
    elif kind == "images":
        own = own.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    else:
        values = one_hot(values, 4).float() if kind == "labels" else values
        own = own.mean(dim=(1, 2, 3)).view(-1, 1)
    torch.testing.assert_close(targets, own * values + (1 - own) * values.roll(3, 0))


@pytest.mark.parametrize(
    ("settings", "target", "shown"),
    [
        ({"mixup": 0.2}, "masks", ["data.mixup=0.2", "data.mixup=0"]),
        ({"cutmix": 1.0}, "numbers", ["data.cutmix=1.0", "data.cutmix=0"]),
        ({"randaugment": [2, 9]}, "images", ["data.randaugment=[2, 9]", "colour_jitter"]),
        ({"mixup": 1.0}, "labels", ["global_batch_size=6", "world_size=2", "use 8"]),
    ],
)
def test_what_cannot_be_augmented_so_is_refused(settings, target, shown) -> None:
    """The share of one of two ranks in a batch of six has no two halves."""
    data = DataConfig(**settings)
    with refused(*shown):
        for augmentation in active_augmentations(data):
            augmentation.check(data, TARGETS[target][0], 6, 2)


def test_the_example_of_an_augmentation_of_ones_own_works() -> None:
    invert, rows, images = Invert(), np.zeros(2, [("inverted", "?")]), some_images()[:2]
    assert invert.is_neutral(rows)
    data: Any = SimpleNamespace(invert=0.5)
    invert.draw(rows, rows, data, lambda name, num: np.array([[0.1], [0.9]]))
    assert torch.equal(invert.apply(images, rows), torch.stack([1 - images[0], images[1]]))


def test_batches_keep_their_memory_format_and_evaluation_its_labels() -> None:
    options = ["data.rotation=30", "data.mixup=0.4", "data.cutmix=1", "data.crop=[24,20]"]
    train, val = loaders_of(*options, "model.channels_last=true", "global_batch_size=12")
    for loader in (val, train):
        inputs, labels = next(iter(loader))
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == (torch.float32 if loader is train else torch.int64)
