"""Augmentations of finished batches do what torchvision's functions do.

That they are the same with every backend, on any ranks and after any resume is in test_contract.py.
"""

import math
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
from loaders.augment import AUGMENTATIONS, Augmentation, active_augmentations, to_device
from loaders.rectangles import neutral_rows
from loaders.targets import Labels, Masks, MultiLabels, RegressionTargets, Target, TargetImages
from tests.helpers import REPOSITORY, refused
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
    assert 0 <= top.min() < bottom.max() == 200
    assert 0 <= left.min() < right.max() == 300
    share = (bottom - top) * (right - left) / (200 * 300)
    assert 0.019 < share.min() < 0.022
    assert 0.32 < share.max() < 0.34


# torchvision's functions of an image, a share of the largest amount of its RandAugment, and a sign
REFERENCES: list[Any] = [
    lambda image, s, sign: image,
    lambda image, s, sign: functional.adjust_brightness(image, 1 + sign * 0.9 * s),
    lambda image, s, sign: functional.adjust_contrast(image, 1 + sign * 0.9 * s),
    lambda image, s, sign: functional.adjust_saturation(image, 1 + sign * 0.9 * s),
    lambda image, s, sign: functional.adjust_sharpness(image, 1 + sign * 0.9 * s),
    lambda image, s, sign: functional.posterize(image, 8 - round(4 * s)),
    lambda image, s, sign: functional.solarize(image, 1 - s),
    lambda image, s, sign: functional.autocontrast(image),
    lambda image, s, sign: functional.equalize(image),
]


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_operations_of_randaugment_are_torchvisions(magnitude: int) -> None:
    rows, images = drawn_rows(120, randaugment=[1, magnitude]), some_images().repeat(20, 1, 1, 1)
    changed = BY_NAME["RandAugment"].apply(images.clone(), rows)
    operations, signs = rows["operations"][:, 0], np.sign(rows["amounts"][:, 0] - 1).tolist()
    for image, result, operation, sign in zip(images, changed, operations, signs, strict=True):
        wanted = REFERENCES[operation](image, magnitude / 30, sign)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-4)  # other weights of grey
    brightened = np.array(signs)[operations == 1]
    assert {*brightened} == ({-1, 1} if magnitude else {0})


def test_randaugment_draws_all_operations_alike_often_and_takes_any_channels() -> None:
    rows = drawn_rows(9000, randaugment=[2, 9])
    for drawn in rows["operations"][:, :2].T:
        assert np.bincount(drawn) == pytest.approx([1000] * 9, rel=0.1)
    for channels in (1, 5):
        images = BY_NAME["RandAugment"].apply(some_images(channels), rows[:COUNT])
        assert images.shape == (COUNT, channels, *SIZE)
        assert 0 <= images.min() <= images.max() <= 1


@pytest.mark.parametrize("alpha", [0.2, 1.0, 40.0])
def test_half_of_the_samples_are_cut_and_the_others_have_beta_distributed_weights(alpha) -> None:
    """As in NumPy: no share below a value differs by more than chance (Kolmogorov-Smirnov, 1 %)."""
    rows, random = drawn_rows(100_000, mixup=alpha, cutmix=1.0), np.random.default_rng(1)
    is_cut = rows["cut_share"] > 0
    assert is_cut.mean() == pytest.approx(0.5, abs=0.01)
    assert (rows["weight"][is_cut] == 1).all()
    ours = np.sort(rows["weight"][~is_cut])
    others = np.sort(random.beta(alpha, alpha, len(ours)).astype(ours.dtype))
    assert 0 <= ours[0] < ours[-1] <= 1
    shares = [np.searchsorted(part, others, side="right") / len(ours) for part in (ours, others)]
    assert abs(shares[0] - shares[1]).max() < 1.63 * math.sqrt(2 / len(ours))
    assert np.isfinite(drawn_rows(1000, mixup=1e-4)["weight"]).all()


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


def test_the_recipe_for_an_augmentation_of_ones_own_works() -> None:
    text = (REPOSITORY / "docs" / "recipes.md").read_text()
    code = text.partition("```python\nclass Invert")[2].partition("```")[0]
    names: dict = {"Augmentation": Augmentation, "np": np, "torch": torch, "to_device": to_device}
    exec("class Invert" + code, names)
    invert, rows = names["Invert"](), np.zeros(4, [("inverted", "?")])
    chances = np.array([[0.1], [0.9], [0.4], [0.6]])
    assert invert.is_neutral(rows)
    invert.draw(rows, rows, SimpleNamespace(invert=0.5), lambda name, num: chances)
    images = some_images()[:4]
    expected = torch.stack([1 - images[0], images[1], 1 - images[2], images[3]])
    assert torch.equal(invert.apply(images, rows), expected)


def test_batches_keep_their_memory_format_and_evaluation_its_labels() -> None:
    options = ["data.rotation=30", "data.mixup=0.4", "data.cutmix=1", "data.crop=[24,20]"]
    train, val = loaders_of(*options, "model.channels_last=true", "global_batch_size=12")
    for loader in (val, train):
        inputs, labels = next(iter(loader))
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == (torch.float32 if loader is train else torch.int64)
