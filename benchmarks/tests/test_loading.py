"""The ways of loading that are compared give the same pixels."""

import importlib
import itertools
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from benchmarks.baselines import Job, Recipe, limits


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Smooth JPEGs of different sizes, so that a shift by a fraction of a pixel changes little."""
    folder = tmp_path_factory.mktemp("photos")
    for number, (height, width) in enumerate([(300, 400), (280, 280), (400, 310), (270, 450)] * 2):
        y, x = np.mgrid[:height, :width] / 60 + number
        pixels = np.stack([np.sin(y), np.cos(x + 1), np.sin(x + y)], axis=2)
        image = Image.fromarray((127 * pixels + 128).astype(np.uint8))
        image.save(folder / f"{number}.jpg", quality=95, subsampling=0)
    return sorted(str(path) for path in folder.iterdir())


def first_images(loader) -> torch.Tensor:
    """The images of an epoch, (N, C, H, W); pairs are concatenated along channels."""
    images = []
    for batch in loader:
        parts = batch if isinstance(batch, tuple) else (batch,)
        images.append(torch.cat(parts, dim=1).clone())  # as some reuse the memory of a batch
    return torch.cat(images)


def difference(images: torch.Tensor, reference: torch.Tensor, recipe: Recipe) -> float:
    """Mean absolute difference of two normalised batches, in 1/255 of the full intensity."""
    std = torch.tensor(recipe.std)
    std = std.repeat(images.shape[1] // len(std)).view(1, -1, 1, 1)  # once per image of a pair
    return float((255 * std * (images - reference).abs()).mean())


def batches_of(function: str, recipe: Recipe, files: list[str], **options):
    module, _, name = function.partition(".")
    load = getattr(importlib.import_module(f"benchmarks.baselines.{module}"), name)
    threads = 0 if module in ("dataloader", "webdataset_shards", "litdata_chunks") else 2
    return load(
        Job(recipe, files, **{"targets": [], "batch_size": 3, "parallel": threads, **options})
    )


# Of packages that requirements.txt does not have, and whose tests are there where they are.
PEERS = {"webdataset": "webdataset_shards", "litdata": "litdata_chunks"}


@pytest.mark.parametrize(
    "function",
    [
        *("dataloader.pil_images", "dataloader.torchvision_images"),
        "dali.minimal",
        *(f"{module}.batches" for package, module in PEERS.items() if find_spec(package)),
    ],
)
def test_ways_of_loading_photos_give_the_pixels_of_pil(
    photos: list[str], tmp_path: Path, function: str
) -> None:
    recipe = Recipe()
    folder = tmp_path / "own format"
    images = first_images(batches_of(function, replace(recipe, train=False), photos, folder=folder))
    assert images.shape == (8, 3, 224, 224)
    expected = torch.stack([pil_reference(path, recipe) for path in photos])
    assert difference(images, expected, recipe) < 2.5  # of 255
    assert all(difference(images.flip(axis), expected, recipe) > 20 for axis in (1, 3))

    first = next(iter(batches_of(function, recipe, photos, folder=folder)))
    assert first.shape == (3, 3, 224, 224)
    assert images.dtype == first.dtype == torch.float32


def pil_reference(path: str, recipe: Recipe) -> torch.Tensor:
    image: Image.Image = Image.open(path)
    scale = 256 / min(image.size)
    width, height = (int(scale * side) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
    return torch.from_numpy(normalised).permute(2, 0, 1).float()


def test_pairs_are_cut_and_flipped_alike(photos: list[str]) -> None:
    recipe = Recipe(256, (224, 224), vflip=0.5, mean=(0.5,), std=(0.5,))
    loader = batches_of("dataloader.pil_pairs", recipe, photos, targets=photos, batch_size=4)
    pairs = list(itertools.islice(itertools.chain(loader, loader), 4))
    assert len(pairs) == 4
    for inputs, targets in pairs:
        assert inputs.shape == (4, 3, 224, 224)
        assert inputs.dtype == torch.float32
        assert -1 <= inputs.min() < -0.5
        assert 0.5 < inputs.max() <= 1
        assert torch.equal(inputs, targets)
    assert not torch.equal(pairs[0][0], pairs[2][0])  # another order, other crops in each epoch


@pytest.mark.parametrize("function", ["dataloader.tifffile_images", "dali.minimal"])
def test_cells_are_read_with_all_channels(tmp_path: Path, function: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 50, 50, 5), np.uint8)
    files = [str(tmp_path / f"{number}.tif") for number in range(4)]
    for path, image in zip(files, pixels, strict=True):
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    reading = Recipe(None, None, train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(function, reading, files, batch_size=4)
    expected = torch.from_numpy((pixels / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    resized = Recipe((220, 224), (220, 220), train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(function, resized, files, batch_size=4)
    assert images.shape == (4, 5, 220, 220)
    assert images.dtype == torch.float32


def test_the_limit_decodes_every_file(photos: list[str]) -> None:
    job = Job(Recipe(), photos, photos, batch_size=4, parallel=2)
    inputs, targets = zip(*itertools.islice(limits.decode(job), 2), strict=True)
    images = list(itertools.chain(*inputs))
    for image, target, path in zip(images, itertools.chain(*targets), photos, strict=True):
        np.testing.assert_array_equal(image, target)
        assert image.shape[:2] == Image.open(path).size[::-1]
