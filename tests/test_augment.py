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
from torch.nn.functional import avg_pool2d, one_hot
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from conf.schema import DataConfig
from loaders.augment import AUGMENTATIONS, Augmentation, active_augmentations, to_device
from loaders.plan import neutral_rows
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


@pytest.mark.parametrize("kind", ["labels", "images", "masks"])
def test_affine_is_torchvisions(kind: str) -> None:
    rows, images, values = neutral_rows(np.arange(COUNT)), some_images(), TARGETS[kind][1]
    rows["angle"], rows["scale"] = [0, 30, -77.5, 176, 5, -5], [1, 1, 0.6, 1.7, 1.2, 1]

    def moved(tensors: Tensor, fill: int = 0, **how: Any) -> Tensor:
        pairs = zip(rows["angle"].tolist(), rows["scale"].tolist(), strict=True)
        moves = [{"angle": a, "scale": s, "translate": [0, 0], "shear": [0, 0]} for a, s in pairs]
        parts = zip(tensors, moves, strict=True)
        return torch.stack([functional.affine(t, **m, fill=[fill], **how) for t, m in parts])

    bilinear = {"interpolation": v2.InterpolationMode.BILINEAR}
    inputs, targets = augmented("Affine", images, rows, kind)
    # torchvision mixes what it fills in by itself; the line where the image ends differs.
    ends = moved(torch.ones_like(images), **bilinear) < 1
    expected = moved(images, **bilinear).masked_fill(ends, 0)
    torch.testing.assert_close(inputs.masked_fill(ends, 0), expected, rtol=0, atol=1e-4)
    if kind == "labels":
        assert torch.equal(targets, values)
    elif kind == "masks":
        assert (targets == moved(values[:, None], fill=255)[:, 0]).float().mean() > 0.995  # ties
        assert set(targets.unique().tolist()) == {0, 1, 2, 3, 255}
    else:
        difference = avg_pool2d(targets, 2) - moved(avg_pool2d(values, 2), **bilinear)
        assert difference[..., 3:-3, 3:-3].abs().mean() < 0.12


def test_gaussian_blur_is_torchvisions() -> None:
    """Each row with its own width, and one without."""
    rows, images = neutral_rows(np.arange(COUNT)), some_images(channels=5)
    rows["sigma"] = [0.3, 0, 1.0, 1.5, 2.0, 2.9]
    blurred = augmented("GaussianBlur", images, rows)[0]
    for image, result, sigma in zip(images, blurred, rows["sigma"].tolist(), strict=True):
        if sigma:
            image = functional.gaussian_blur(image, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma] * 2)
        torch.testing.assert_close(result, image, rtol=0, atol=1e-5)
    drawn = drawn_rows(1000, gaussian_blur=[0.25, 1.0, 2.0])["sigma"]
    assert 1 <= drawn[drawn > 0].min() < drawn.max() <= 2
    assert (drawn > 0).mean() == pytest.approx(0.25, abs=0.05)
    rows["sigma"] = 30.0  # wider than the image, which is reflected once
    assert augmented("GaussianBlur", images, rows)[0].isfinite().all()


def test_random_erasing_is_torchvisions_with_the_papers_shares() -> None:
    rows, images = drawn_rows(20_000, random_erasing=0.25), some_images() + 1
    results = augmented("RandomErasing", images, rows[:COUNT])[0]
    boxes = BY_NAME["RandomErasing"].boxes(rows[:COUNT], *SIZE)
    for image, result, (top, bottom, left, right) in zip(images, results, boxes, strict=True):
        box = (top, left, bottom - top, right - left)
        assert torch.equal(result, functional.erase(image, *box, torch.tensor(0.0)))
    erased = rows[rows["erased_share"] > 0]
    assert len(erased) == pytest.approx(5000, rel=0.05)
    top, bottom, left, right = BY_NAME["RandomErasing"].boxes(erased, 200, 300).T
    assert 0 <= top.min() < bottom.max() == 200
    assert 0 <= left.min() < right.max() == 300
    share = (bottom - top) * (right - left) / (200 * 300)
    assert 0.019 < share.min() < 0.022
    assert 0.32 < share.max() < 0.34


# torchvision's functions of an image, a share of the largest amount of its RandAugment, and a sign
REFERENCES: dict[str, Any] = {
    "brightness": lambda image, s, sign: functional.adjust_brightness(image, 1 + sign * 0.9 * s),
    "contrast": lambda image, s, sign: functional.adjust_contrast(image, 1 + sign * 0.9 * s),
    "colour": lambda image, s, sign: functional.adjust_saturation(image, 1 + sign * 0.9 * s),
    "sharpness": lambda image, s, sign: functional.adjust_sharpness(image, 1 + sign * 0.9 * s),
    "posterize": lambda image, s, sign: functional.posterize(image, 8 - round(4 * s)),
    "solarize": lambda image, s, sign: functional.solarize(image, 1 - s),
    "autocontrast": lambda image, s, sign: functional.autocontrast(image),
    "equalize": lambda image, s, sign: functional.equalize(image),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_operations_of_randaugment_are_torchvisions(name: str) -> None:
    """Each row has its own sign; two rows have no operation."""
    rows, images = neutral_rows(np.arange(COUNT)), some_images()
    signs = [1, -1, 1, -1, 1, 1]
    chances = np.zeros((COUNT, 8))  # of four operations, and of their signs
    chances[:4, 0] = (list(REFERENCES).index(name) + 1.5) / 9  # the first one is to do nothing
    chances[:, 4] = np.array(signs) > 0
    for magnitude in (0, 9, 30):
        data = DataConfig(randaugment=[1, magnitude])
        augment = BY_NAME["RandAugment"]
        augment.draw(rows, np.full((COUNT, 2), 8), data, lambda name, num: chances)
        changed = augment.apply(images.clone(), rows)
        for row, (image, result) in enumerate(zip(images, changed, strict=True)):
            wanted = REFERENCES[name](image, magnitude / 30, signs[row]) if row < 4 else image
            torch.testing.assert_close(result, wanted, rtol=0, atol=1e-4)  # other weights of grey


def test_randaugment_draws_all_operations_alike_often_and_takes_any_channels() -> None:
    rows = drawn_rows(9000, randaugment=[2, 9])
    for drawn in rows["operations"][:, :2].T:
        assert np.bincount(drawn) == pytest.approx([1000] * 9, rel=0.1)
    for channels in (1, 5):
        images = BY_NAME["RandAugment"].apply(some_images(channels), rows[:COUNT])
        assert images.shape == (COUNT, channels, *SIZE)
        assert 0 <= images.min() <= images.max() <= 1


@pytest.mark.parametrize("alpha", [0.2, 1.0, 40.0])
def test_weights_of_mixtures_are_beta_distributed(alpha: float) -> None:
    """As in NumPy: no share below a value differs by more than chance (Kolmogorov-Smirnov, 1 %)."""
    count, random = 50_000, np.random.default_rng(1)
    ours = np.sort(drawn_rows(count, mixup=alpha)["weight"])
    others = np.sort(random.beta(alpha, alpha, count).astype(ours.dtype))
    assert 0 <= ours[0] < ours[-1] <= 1
    shares = [np.searchsorted(part, others, side="right") / count for part in (ours, others)]
    assert abs(shares[0] - shares[1]).max() < 1.63 * math.sqrt(2 / count)
    assert np.isfinite(drawn_rows(count, mixup=1e-4)["weight"]).all()


def test_with_both_half_of_the_samples_are_mixed_each_way() -> None:
    rows = drawn_rows(2000, mixup=0.4, cutmix=1.0)
    is_cut = rows["cut_share"] > 0
    assert is_cut.sum() == pytest.approx(1000, rel=0.1)
    assert (rows["weight"][is_cut] == 1).all()
    assert (rows["weight"][~is_cut] < 1).mean() > 0.95  # some are next to 1


MIXTURES = [(kind, name) for kind in TARGETS for name in ("mixup", "cutmix")]


@pytest.mark.parametrize(
    ("kind", "name"), [m for m in MIXTURES if m not in [("masks", "mixup"), ("numbers", "cutmix")]]
)
def test_targets_are_mixed_as_inputs_are(kind: str, name: str) -> None:
    rows, images, values = drawn_rows(**{name: 1.0}), some_images(), TARGETS[kind][1]
    partner = [3, 4, 5, 0, 1, 2]
    mixed, targets = augmented("Mixing", images, rows, kind)
    own = torch.from_numpy(rows["weight"].copy()).view(-1, 1, 1, 1).repeat(1, 1, *SIZE)
    boxes = BY_NAME["Mixing"].boxes(rows, *SIZE)
    for share, (top, bottom, left, right) in zip(own, boxes.tolist(), strict=True):
        share[:, top:bottom, left:right] = 0
    assert ((own == 0).any() and (own == 1).any()) == (name == "cutmix")
    torch.testing.assert_close(mixed, own * images + (1 - own) * images[partner])
    if kind == "masks":
        assert torch.equal(targets, torch.where(own[:, 0] == 1, values, values[partner]))
        return
    if kind == "images":
        own = own.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    else:
        values = one_hot(values, 4).float() if kind == "labels" else values
        own = own.mean(dim=(1, 2, 3)).view(-1, 1)
    torch.testing.assert_close(targets, own * values + (1 - own) * values[partner])


@pytest.mark.parametrize(
    ("settings", "target", "batch", "ranks", "shown"),
    [
        ({"mixup": 0.2}, "masks", 8, 1, ["data.mixup=0.2", "data.mixup=0"]),
        ({"cutmix": 1.0}, "numbers", 8, 1, ["data.cutmix=1.0", "data.cutmix=0"]),
        ({"randaugment": [2, 9]}, "images", 8, 1, ["data.randaugment=[2, 9]", "colour_jitter"]),
        ({"cutmix": 1.0}, "labels", 7, 1, ["global_batch_size=7", "use 8"]),
        ({"mixup": 1.0}, "labels", 6, 2, ["global_batch_size=6", "world_size=2", "use 8"]),
    ],
)
def test_what_cannot_be_augmented_so_is_refused(settings, target, batch, ranks, shown) -> None:
    data = DataConfig(**settings)
    with refused(*shown):
        for augmentation in active_augmentations(data):
            augmentation.check(data, TARGETS[target][0], batch, ranks)


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
