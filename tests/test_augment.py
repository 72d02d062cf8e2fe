"""Augmentations of finished batches do what torchvision's functions of the same parameters do, alike in
every backend, on any number of ranks and after any resume."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from conf.schema import DataConfig
from loaders.augment import (
    AUGMENTATIONS,
    Augmentation,
    active_augmentations,
    on_device,
    probabilities,
)
from loaders.image_loaders import build_loaders
from loaders.plan import neutral_rows
from loaders.targets import Labels, Masks, MultiLabels, RegressionTargets, Target, TargetImages
from tasks import build_task
from tests.helpers import REPOSITORY, make_config
from tests.images import cut_short, save, smooth

CPU = torch.device("cpu")
BY_NAME: dict[str, Any] = {type(a).__name__: a for a in AUGMENTATIONS}
COUNT, SIZE = 6, (20, 28)
TARGETS: dict[str, tuple[Target, torch.Tensor]] = {
    "labels": (Labels(np.zeros(0), tuple("abcd")), torch.tensor([0, 1, 2, 3, 0, 1])),
    "several labels": (MultiLabels(np.zeros(0), tuple("ab")), torch.eye(COUNT)[:, :2]),
    "numbers": (RegressionTargets(np.zeros(0), ("x",)), torch.arange(COUNT)[:, None] * 1.5),
    "images": (TargetImages(size_factor=2), torch.rand(COUNT, 3, 40, 56)),
    "masks": (Masks(tuple("abcd"), 255), torch.randint(4, (COUNT, *SIZE))),
}
EVERYTHING = [
    *("data.colour_jitter=[0.2,0.2,0.2]", "data.randaugment=[2,9]", "data.rotation=30"),
    *("data.random_scale=[0.8,1.2]", "data.gaussian_blur=[0.5,0.5,1.5]"),
    *("data.random_erasing=0.5", "data.mixup=0.4", "data.cutmix=1"),
]


def some_images(channels: int = 3) -> torch.Tensor:
    """(6, channels, 20, 28) in [0, 1]: smooth, one of them a constant."""
    images = np.stack([smooth(number, *SIZE) for number in range(COUNT)]) / 255.0
    images[3] = 0.2
    return torch.from_numpy(images).permute(0, 3, 1, 2).float()[:, [0, 1, 2, 0, 1][:channels]]


def drawn_rows(count: int = COUNT, /, **settings) -> np.ndarray:
    rows = neutral_rows(np.arange(count))
    random = np.random.default_rng(0)
    data = DataConfig(**settings)
    for augmentation in active_augmentations(data):
        augmentation.draw(
            rows, np.full((count, 2), 8), data, lambda name, num: random.random((count, num))
        )
    return rows


def inside(boxes: np.ndarray, height: int, width: int) -> torch.Tensor:
    """(B, 1, height, width) bool: the pixels in boxes of top, bottom, left and right."""
    masks = torch.zeros((len(boxes), 1, height, width), dtype=torch.bool)
    for mask, (top, bottom, left, right) in zip(masks, boxes.tolist(), strict=True):
        mask[:, top:bottom, left:right] = True
    return masks


# as torchvision does it


@pytest.mark.parametrize(("angle", "scale"), [(0, 1), (30, 1), (-77.5, 0.6), (176, 1.7), (5, 1)])
def test_affine_is_torchvisions(angle: float, scale: float) -> None:
    rows = neutral_rows(np.arange(COUNT))
    rows["angle"], rows["scale"] = angle, scale
    images = some_images()
    for kind in ("labels", "images", "masks"):
        target, values = TARGETS[kind]
        inputs, targets = BY_NAME["Affine"].apply_to_both(
            images.clone(), values.clone(), rows, target
        )
        how = {"angle": angle, "translate": [0, 0], "scale": scale, "shear": [0, 0]}
        bilinear = how | {"interpolation": v2.InterpolationMode.BILINEAR, "fill": 0}
        expected = functional.affine(images, **bilinear)
        # torchvision mixes what it fills in by itself; the line where the image ends differs.
        ends = functional.affine(torch.ones_like(images), **bilinear) < 1
        torch.testing.assert_close(
            inputs.masked_fill(ends, 0), expected.masked_fill(ends, 0), rtol=0, atol=1e-4
        )
        if kind == "labels":
            assert torch.equal(targets, values)
        if kind == "masks":
            moved = functional.affine(values[:, None], **how, fill=255)[:, 0]
            assert (targets == moved).float().mean() > 0.995  # ties between two pixels
            assert set(targets.unique().tolist()) <= {0, 1, 2, 3, 255}
        if kind == "images":
            reduced = torch.nn.functional.avg_pool2d(targets, 2)
            again = functional.affine(torch.nn.functional.avg_pool2d(values, 2), **bilinear)
            assert (reduced - again)[..., 3:-3, 3:-3].abs().mean() < 0.12


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_gaussian_blur_is_torchvisions(channels: int) -> None:
    """Each row with its own width, and one without."""
    rows, images = neutral_rows(np.arange(COUNT)), some_images(channels)
    rows["sigma"] = [0.3, 0, 1.0, 1.5, 2.0, 2.9]
    target, values = TARGETS["labels"]
    blurred, _ = BY_NAME["GaussianBlur"].apply_to_both(images.clone(), values, rows, target)
    for image, result, sigma in zip(images, blurred, rows["sigma"].tolist(), strict=True):
        if sigma:
            image = functional.gaussian_blur(image, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma] * 2)
        torch.testing.assert_close(result, image, rtol=0, atol=1e-5)
    rows["sigma"] = 30.0  # wider than the image, which is reflected once
    assert (
        BY_NAME["GaussianBlur"]
        .apply_to_both(images.clone(), values, rows, target)[0]
        .isfinite()
        .all()
    )


def test_random_erasing_is_torchvisions() -> None:
    rows = drawn_rows(random_erasing=0.4)
    images = some_images() + 1
    target, values = TARGETS["labels"]
    erased, _ = BY_NAME["RandomErasing"].apply_to_both(images.clone(), values, rows, target)
    boxes = BY_NAME["RandomErasing"].boxes(rows, *SIZE)
    assert 0 < (rows["erased_share"] > 0).sum() < COUNT
    for image, result, (top, bottom, left, right) in zip(images, erased, boxes, strict=True):
        box = (top, left, bottom - top, right - left)
        assert torch.equal(result, functional.erase(image, *box, torch.tensor(0.0)))


def test_erased_rectangles_have_the_papers_shares_and_ratios() -> None:
    rows = drawn_rows(20_000, random_erasing=0.25)
    erased = rows[rows["erased_share"] > 0]
    assert len(erased) == pytest.approx(5000, rel=0.05)
    top, bottom, left, right = BY_NAME["RandomErasing"].boxes(erased, 200, 300).T
    assert 0 <= top.min() < bottom.max() == 200
    assert 0 <= left.min() < right.max() == 300
    share = (bottom - top) * (right - left) / (200 * 300)
    assert 0.019 < share.min() < 0.022
    assert 0.32 < share.max() < 0.34
    ratio = ((bottom - top) / (right - left))[(bottom - top < 200) & (share > 0.1)]
    assert 0.29 < ratio.min() < ratio.max() < 3.4
    assert np.median(ratio) == pytest.approx(1, rel=0.15)


REFERENCES = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "colour": functional.adjust_saturation,
    "sharpness": functional.adjust_sharpness,
    "posterize": lambda image, bits: functional.posterize(image, int(bits)),
    "solarize": functional.solarize,
    "autocontrast": lambda image, _: functional.autocontrast(image),
    "equalize": lambda image, _: functional.equalize(image),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_operations_of_randaugment_are_torchvisions(name: str, magnitude: int) -> None:
    """With the amounts of torchvision's RandAugment, other ones in each row, beside rows with none."""
    rows, images = neutral_rows(np.arange(COUNT)), some_images()
    signs = np.array([1, -1, 1, -1, 1, 1])
    chances = np.zeros((COUNT, 8))  # of four operations, and of their signs
    chances[:4, 0] = (list(REFERENCES).index(name) + 1.5) / 9  # the first one is to do nothing
    chances[:, 4] = signs > 0
    augmentation = BY_NAME["RandAugment"]
    data = DataConfig(randaugment=[1, magnitude])
    augmentation.draw(rows, np.full((COUNT, 2), 8), data, lambda name, num: chances)
    changed = augmentation.apply(images.clone(), rows)
    title = {"colour": "Color", "autocontrast": "AutoContrast"}.get(name, name.capitalize())
    magnitudes, is_signed = v2.RandAugment._AUGMENTATION_SPACE[title]
    for row, (image, result) in enumerate(zip(images, changed, strict=True)):
        amount = magnitudes(31, *SIZE)
        value = 0.0 if amount is None else float(amount[magnitude])
        expected = image
        if row < 4:
            expected = REFERENCES[name](image, 1 + signs[row] * value if is_signed else value)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)  # other weights of grey


def test_randaugment_draws_all_operations_alike_often_and_takes_any_channels() -> None:
    rows = drawn_rows(9000, randaugment=[2, 9])
    drawn = rows["operations"]
    for turn in (0, 1):
        assert np.bincount(drawn[:, turn]) == pytest.approx([1000] * 9, rel=0.1)
    assert not drawn[:, 2:].any()
    for channels in (1, 5):
        images = BY_NAME["RandAugment"].apply(some_images(channels), rows[:COUNT])
        assert images.shape == (COUNT, channels, *SIZE)
        assert 0 <= images.min() <= images.max() <= 1


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 3.0, 40.0])
def test_weights_of_mixtures_are_beta_distributed(alpha: float) -> None:
    """As NumPy's are: no share below any value differs by more than chance (Kolmogorov, Smirnov; 1 %)."""
    count, random = 50_000, np.random.default_rng(1)
    ours = np.sort(drawn_rows(count, mixup=alpha)["weight"])
    others = np.sort(random.beta(alpha, alpha, count).astype(ours.dtype))
    assert 0 <= ours[0] < ours[-1] <= 1
    shares = [np.searchsorted(part, others, side="right") / count for part in (ours, others)]
    assert abs(shares[0] - shares[1]).max() < 1.63 * math.sqrt(2 / count)
    assert np.isfinite(drawn_rows(count, mixup=1e-4)["weight"]).all()


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixing_two_samples_is_torchvisions(name: str) -> None:
    images, rows = some_images()[:2], drawn_rows(**{name: 1.0})[:2]
    target, values = TARGETS["labels"]
    mixed, labels = BY_NAME["Mixing"].apply_to_both(images.clone(), values[:2], rows, target)
    for row in (0, 1):
        top, bottom, left, right = BY_NAME["Mixing"].boxes(rows, *SIZE)[row].tolist()
        params = {
            "labels": values[:2],
            "batch_size": 2,
            "lam": float(rows["weight"][row]),
            "box": (left, top, right, bottom),
            "lam_adjusted": 1 - (bottom - top) * (right - left) / math.prod(SIZE),
        }
        reference = v2.MixUp(num_classes=4) if name == "mixup" else v2.CutMix(num_classes=4)
        expected = (
            reference.transform(images, params),
            reference.transform(params["labels"], params),
        )
        for result, other in zip((mixed, labels), expected, strict=True):
            torch.testing.assert_close(result[row], other[row], rtol=0, atol=1e-6)


# what is mixed with what


def test_with_both_half_of_the_samples_are_mixed_each_way() -> None:
    rows = drawn_rows(2000, mixup=0.4, cutmix=1.0)
    is_cut = rows["cut_share"] > 0
    assert is_cut.sum() == pytest.approx(1000, rel=0.1)
    assert (rows["weight"][is_cut] == 1).all()
    assert (rows["weight"][~is_cut] < 1).mean() > 0.95  # some are next to 1


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_targets_are_mixed_as_inputs_are(kind: str, name: str) -> None:
    rows, images = drawn_rows(**{name: 1.0}), some_images()
    target, values = TARGETS[kind]
    if (kind, name) in [("masks", "mixup"), ("numbers", "cutmix")]:
        return
    partner = [3, 4, 5, 0, 1, 2]
    mixed, targets = BY_NAME["Mixing"].apply_to_both(images.clone(), values.clone(), rows, target)
    boxes = BY_NAME["Mixing"].boxes(rows, *SIZE)
    own = torch.from_numpy(rows["weight"].copy()).view(-1, 1, 1, 1) * ~inside(boxes, *SIZE)
    torch.testing.assert_close(mixed, own * images + (1 - own) * images[partner])
    if kind == "masks":
        assert torch.equal(targets, torch.where(own[:, 0] == 1, values, values[partner]))
    elif kind == "images":
        large = own.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        torch.testing.assert_close(targets, large * values + (1 - large) * values[partner])
    else:
        values = probabilities(values, 4) if kind == "labels" else values
        share = own.mean(dim=(1, 2, 3)).view(-1, 1)
        torch.testing.assert_close(targets, share * values + (1 - share) * values[partner])


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=lambda a: type(a).__name__)
def test_neutral_rows_change_nothing(augmentation) -> None:
    rows, images = neutral_rows(np.arange(COUNT)), some_images()
    assert augmentation.is_neutral(rows)
    assert augmentation.active_keys(make_config().data) == []
    target, values = TARGETS["masks"]
    if type(augmentation).__name__ == "GaussianBlur":
        return  # it is not called with neutral rows
    assert torch.allclose(augmentation.apply(images.clone(), rows), images)
    inputs, targets = augmentation.apply_to_both(images.clone(), values.clone(), rows, target)
    torch.testing.assert_close(inputs, images, rtol=0, atol=1e-5)
    assert torch.equal(targets, values)


@pytest.mark.parametrize(
    ("overrides", "target", "batch", "world_size", "message"),
    [
        (["data.mixup=0.2"], "masks", 8, 1, "data.mixup=0.2 .*; use data.mixup=0"),
        (["data.cutmix=1"], "numbers", 8, 1, "data.cutmix=1.0 .*; use data.cutmix=0"),
        (["data.randaugment=[2,9]"], "images", 8, 1, r"data.randaugment=\[2, 9\] .*colour_jitter"),
        (
            ["data.cutmix=1"],
            "labels",
            7,
            1,
            "global_batch_size=7 .*; use 8",
        ),
        (
            ["data.mixup=1"],
            "labels",
            6,
            2,
            "data.mixup .*global_batch_size=6 .*world_size=2 .*; use 8",
        ),
    ],
)
def test_what_cannot_be_augmented_so_is_refused(
    overrides, target, batch, world_size, message
) -> None:
    data = make_config(*overrides).data
    with pytest.raises(ValueError, match=message):
        for augmentation in active_augmentations(data):
            augmentation.check(data, TARGETS[target][0], batch, world_size)


def test_the_recipe_for_an_augmentation_of_ones_own_works() -> None:
    text = (REPOSITORY / "docs" / "recipes.md").read_text()
    code = text.partition("```python\nclass Invert")[2].partition("```")[0]
    names: dict = {"Augmentation": Augmentation, "on_device": on_device}
    exec("class Invert" + code, names)
    invert, rows = names["Invert"](), np.zeros(4, [("inverted", "?")])
    chances = np.array([[0.1], [0.9], [0.4], [0.6]])
    assert invert.is_neutral(rows)
    invert.draw(rows, rows, SimpleNamespace(invert=0.5), lambda name, num: chances)
    images = some_images()[:4]
    expected = torch.stack([1 - images[0], images[1], 1 - images[2], images[3]])
    assert torch.equal(invert.apply(images, rows), expected)


# in every backend, on any number of ranks, after any resume

DIGITS = ["data.mean=[0.13]", "data.std=[0.31]", "global_batch_size=12", "data.hflip=0.5"]


def batches_of(world_size: int, tmp_path: Path, *overrides: str, stop: int = 0) -> list:
    """The first three batches of all ranks together, in the order of one process; with `stop`, each
    rank goes on after so many batches in a loader of its own that knows nothing but the checkpoint."""
    cfg = make_config(*DIGITS, *EVERYTHING, *overrides, f"data.cache_dir={tmp_path}")
    ranks = []
    for rank in range(world_size):
        loader, _ = build_loaders(cfg, CPU, rank, world_size)
        got = []
        for inputs, targets in loader:
            got.append((inputs.clone(), targets))
            if len(got) == stop:
                state = loader.state_dict()
                loader, _ = build_loaders(cfg, CPU, rank, world_size)
                loader.load_state_dict(state)
                got += [batch for _, batch in zip(range(3 - stop), loader, strict=False)]
            if len(got) == 3:
                break
        ranks.append(got)
    interleaved = [
        tuple(torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*batch, strict=True))
        for batch in zip(*ranks, strict=True)
    ]
    assert len(interleaved) == 3
    return interleaved


@pytest.mark.parametrize(
    ("world_size", "overrides", "stop"),
    [
        (2, [], 0),
        (3, ["loader=dali"], 1),
        (6, ["loader.num_workers=1"], 0),
        (2, ["model.channels_last=true"], 2),
        (1, ["loader=dali"], 0),
    ],
)
def test_every_augmentation_is_the_same_on_any_ranks_and_after_any_resume(
    world_size: int, overrides: list[str], stop: int, tmp_path: Path
) -> None:
    """Partners included: to the bit."""
    expected = batches_of(1, tmp_path)
    got = batches_of(world_size, tmp_path, *overrides, stop=stop)
    for (inputs, labels), (other_inputs, other_labels) in zip(expected, got, strict=True):
        assert labels.shape == (12, 10)
        assert torch.equal(labels, other_labels)
        assert torch.allclose(labels.sum(dim=1), torch.ones(12))
        assert ((labels > 0).sum(dim=1) > 1).any()
        assert torch.equal(inputs, other_inputs)


def test_batches_keep_their_memory_format_and_evaluation_its_labels(tmp_path: Path) -> None:
    options = [*DIGITS, *EVERYTHING, "model.channels_last=true", "data.crop=[24,20]"]
    train, val = build_loaders(make_config(*options, f"data.cache_dir={tmp_path}"), CPU)
    for loader in (train, val):
        inputs, labels = next(iter(loader))
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == (torch.float32 if loader is train else torch.int64)
    synthetic, _ = build_loaders(make_config(*options, "loader=synthetic"), CPU)
    assert next(iter(synthetic))[1].shape == (12, 10)
    task = build_task(make_config(*options, "task.label_smoothing=0.1", "loss.weights=auto"), train)
    inputs, labels = next(iter(train))
    outputs = torch.randn(12, 10, requires_grad=True)
    task.loss(outputs, labels).backward()
    hard = probabilities(labels.argmax(dim=1), 10)
    assert torch.allclose(task.loss(outputs, hard), task.loss(outputs, labels.argmax(dim=1)))


@pytest.mark.parametrize("backend", ["pytorch", "workers", "dali"])
def test_partners_of_samples_that_replace_bad_ones_are_right(backend: str, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for number in range(24):
        save(root / "abc"[number % 3] / f"{number}.jpg", smooth(number, 40, 44), quality=95)
    options = ["data=imagefolder", f"data.root={root}", "data.resize=null", "data.crop=[32,32]"]
    options += ["data.on_error=skip", "data.mixup=0.4", "data.cutmix=1", "data.val_count=6"]
    options += ["loader.num_workers=1"] if backend == "workers" else []
    backend = "dali" if backend == "dali" else "pytorch"
    cfg = make_config(
        *options, f"loader={backend}", "global_batch_size=4", f"data.cache_dir={tmp_path}"
    )
    loaders = [build_loaders(cfg, CPU, rank, 2)[0] for rank in (0, 1)]
    samples = loaders[0].sampler.plan(np.arange(16))["sample"]
    cut_short(loaders[0].index.files[0][samples[4]])
    assert isinstance(loaders[0].index.target, Labels)
    labels = torch.from_numpy(loaders[0].index.target.values)
    for rank, loader in enumerate(loaders):
        for inputs, targets in loader:
            rows = loader.last_rows
            assert len(rows) == len(inputs) == 2
            assert not (rows["sample"] == samples[4]).any()
            own = probabilities(labels[rows["sample"].copy()], 3)
            target = Labels(np.zeros(0), tuple("abc"))
            _, expected = BY_NAME["Mixing"].apply_to_both(
                inputs, labels[rows["sample"].copy()], rows, target
            )
            assert torch.equal(targets, expected)
            assert ((targets > 0) <= ((own + own.roll(1, 0)) > 0)).all()
        assert bool(loader.sampler.bad) == (rank == 0)
