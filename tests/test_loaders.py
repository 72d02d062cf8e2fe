"""Pixels of photos that are turned or decoded in part, normalisation, threads, CPUs."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.index import BadFileError
from loaders.limits import cpus_per_rank
from loaders.workers import default_workers
from tests.helpers import refused
from tests.images import (
    PLAIN,
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    reading,
    save,
    save_tiff,
    smooth,
    turned,
)
from tests.kinds import OTHERS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 8)


def test_photos_are_turned_or_not(root: Path) -> None:
    """Also PNGs whose tags are behind their pixels, and TIFFs, which Pillow would turn."""
    stored = smooth(0, 50, 60)
    for name, form in (("one.png", "PNG"), ("two.png", "WEBP"), ("behind.png", "PNG")):
        save(root / "a" / name, Image.fromarray(stored), format=form, exif=turned(6), lossless=True)
    Image.fromarray(stored).save(root / "a" / "three.tif", tiffinfo={0x112: 6})
    tag: dict[str, Any] = {"extratags": [(0x112, 3, 1, 6, True)]}
    save_tiff(root / "a" / "grey.tif", stored[..., 0] * np.uint16(257), **tag)
    content = (behind := root / "a" / "behind.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4])
    behind.write_bytes(content[:start] + content[end:-12] + content[start:end] + content[-12:])
    options = photos_in(root, "data.val_count=1")
    for given, expected in (("null", np.rot90(stored, -1)), ("false", stored)):
        indexes = index_of(*options, f"data.exif={given}")
        # DALI finds no tags in a WebP.
        assert all(index.headers[0]["dali"].all() for index in indexes) == (given == "false")
        for index in indexes:
            for sample, name in enumerate(paths_in(index)):
                if name.endswith(("png", "tif")):
                    pixels = expected[..., :1] if name.endswith("grey.tif") else expected
                    assert (index.read(sample) == pixels).all()


REDUCED = ["data.reduced_decoding=true"]


def test_reduced_decoding_changes_pixels_a_little(tmp_path: Path) -> None:
    """16 large JPEGs, turned in all ways; every third one is progressive."""
    for number in range(16):
        more = {"quality": 90, "progressive": number % 3 > 1, "exif": turned(1 + number % 8)}
        image = smooth(number, 301 + number, 420 - 3 * number)
        save(tmp_path / "photos" / "ab"[number % 2] / f"{number:02d}.jpg", image, **more)
    options = photos_in(tmp_path / "photos", *PLAIN, "data.resize=64", "data.hflip=0.5")
    # Differences from whole decoding and from other backends, on average and at most, of 255.
    for crops, mean, most in (
        (["data.random_crop=true", "data.crop=[48,48]"], 0.6, 6),
        (["data.random_resized_crop=[0.3,1]", "data.crop=[24,24]"], 0.9, 12),  # most at 1/8
    ):
        found = []
        for other in (REDUCED, ["data.reduced_decoding=false"], *OTHERS.values()):
            splits = loaders_of(*options, *crops, *other)
            found.append(torch.cat([inputs.clone() for split in splits for inputs, _ in split]))
        for whole in found[1:]:
            difference = 255 * (found[0] - whole).abs()
            assert 0 < difference.mean() < mean
            assert difference.max() <= most


def test_lines_of_a_png_are_right_or_its_damage_is_seen(root: Path) -> None:
    """One byte is damaged, each in turn."""
    image = np.random.default_rng(0).integers(0, 4, (12, 10, 3), dtype=np.uint8)
    save(path := root / "a" / "0.png", image)
    splits = index_of(*photos_in(root, "data.val_count=1"))
    [index] = [index for index in splits if str(path) in paths_in(index)]
    sample, content, num_errors = paths_in(index).index(str(path)), path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        try:
            top = index.read_part(sample, 0, (0, 0, 5, 10), (5, 10), False)
        except BadFileError:
            num_errors += 1
        else:
            assert np.array_equal(top, image[:5]), at
    assert num_errors > 0.8 * len(content)


def test_uncompressed_tiffs_are_decoded_without_a_library(tmp_path: Path, monkeypatch) -> None:
    """Which takes microseconds; also where whole batches cannot be read, as of images that are
    resized."""
    image = np.arange(8 * 10 * 5, dtype=np.uint16).reshape(8, 10, 5)
    for label in "ab":
        save_tiff(tmp_path / "tiffs" / label / "1.tif", image)
    index = index_of("data=cells", "data.val_count=1", *reading(tmp_path / "tiffs"))[0]
    monkeypatch.setattr("loaders.images.stored.imread", None)
    assert np.array_equal(index.read(0), image)


@pytest.mark.parametrize(("channels", "dtype"), [(4, "uint8"), (5, "uint16")])
def test_tiffs_of_several_kinds_are_refused(channels, dtype, tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/1"):
        save_tiff(tmp_path / "tiffs" / f"{name}.tif", np.zeros((8, 10, 5), np.uint8))
    save_tiff(tmp_path / "tiffs" / "b" / "2.tif", np.zeros((8, 10, channels), dtype))
    with refused("1 of 4 images", "b/2.tif"):
        index_of("data=cells", *reading(tmp_path / "tiffs"))


def test_inputs_are_normalised_with_mean_and_std() -> None:
    loader, _ = loaders_of("global_batch_size=1000")
    inputs, _ = next(iter(loader))
    assert abs(inputs.mean()) < 0.05
    assert abs(inputs.std() - 1) < 0.05
    pictures: Any = loader.info.pictures(inputs)
    assert 0 <= pictures.min() < 1e-3
    assert 0.99 < pictures.max() <= 1


def test_the_training_keeps_its_number_of_threads() -> None:
    """Otherwise a fresh run trains with one; a resumed one, which loads large tensors, with all."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def train() -> int:  # in a thread that has not computed anything yet
        loader, _ = loaders_of()
        next(iter(loader))
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(train).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mine", "torchruns", "ranks", "limit", "cpus"),
    [
        (64, 64, 1, "max 100000", 64),
        (8, 64, 8, None, 8),  # torchrun --numa-binding=exclusive
        (8, 64, 8, "1600000 100000", 2),
        (64, 64, 1, "150000 100000", 1),
    ],
)
def test_ranks_share_cpus(mine, torchruns, ranks, limit, cpus, monkeypatch, tmp_path) -> None:
    """And a GPU has workers for all but one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    of_process = {0: set(range(mine)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", of_process.__getitem__)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cpus_per_rank(tmp_path) == cpus
    most = cpus_per_rank() - 1
    for device, num_samples, num_threads, count in (
        ("cuda", 10**9, 0, most),
        ("cuda", 10**9, 2, most // 2),
        ("cuda", 64, 0, min(1, most)),
        ("cuda", 0, 0, 0),  # pixels in memory
        ("cpu", 10**9, 0, 0),
    ):
        assert default_workers(torch.device(device), num_samples, num_threads) == count


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_do_not_overwrite_what_is_still_used(num_workers: int, tmp_path: Path) -> None:
    """Their memory is used again, also after an epoch was left early."""
    options = [f"data.cache_dir={tmp_path}", "global_batch_size=64", "data.hflip=0.5"]
    options += ["loader.prefetch_factor=1"]
    expected, found = (loaders_of(*options, f"loader.num_workers={n}")[0] for n in (0, num_workers))
    transform = found.transform

    def slow_transform(batch: Any) -> Any:
        time.sleep(0.02)
        return transform(batch)

    found.transform = slow_transform
    for epoch in (0, 1):
        next(iter(found))
        expected.set_epoch(epoch + 1)
        found.set_epoch(epoch + 1)
        for batch, other in zip(expected, found, strict=True):
            assert all(map(torch.equal, batch, other))
