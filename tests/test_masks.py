"""Masks go through every backend exactly like their images, and no pixel of them is ever mixed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from loaders import build_loaders
from loaders.check import check
from loaders.decode import decode_mask
from loaders.layouts import build_index
from loaders.pack import pack
from loaders.targets import Masks
from tests.helpers import (
    SCRIPTS,
    checkpoint_of,
    events_of,
    make_config,
    published,
    summary_of,
    train,
    validated,
)

CPU = torch.device("cpu")
BACKENDS = ["pytorch", "workers", "dali", "packed"]
INDICES = (0, 3, 7, 200)  # far apart, so that a mixture of two would be a new one
IGNORED = 255


def save(path: Path, image: np.ndarray, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".tif":
        tifffile.imwrite(path, image)
        return
    stored = Image.fromarray(image)
    if palette:
        stored = stored.convert("L")
        stored.putpalette([(37 * i) % 256 for i in range(768)])
    stored.save(path)


def scene(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(image, mask): a mask of 4x4 blocks of random classes, and an image that shows index / 255."""
    random = np.random.default_rng(number)
    height, width = 40 + 4 * (number % 3), 56
    blocks = random.choice([*INDICES, IGNORED], (height // 4, width // 4)).astype(np.uint8)
    mask = blocks.repeat(4, axis=0).repeat(4, axis=1)
    return np.stack([mask, mask, np.full_like(mask, number)], axis=-1), mask


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """20 PNGs and their masks: 8 bits, 16 bits, palette, TIFFs of 8 and 16 bits, in turn."""
    root = tmp_path_factory.mktemp("scenes")
    for number in range(20):
        image, mask = scene(number)
        name = f"place{number % 2}/{number:02d}"
        save(root / "images" / f"{name}.png", image)
        form = number % 5
        path = root / "masks" / f"{name}.{'tif' if form >= 3 else 'png'}"
        save(path, mask.astype(np.uint16) if form in (1, 4) else mask, palette=form == 2)
    return root


def loaders_of(
    backend: str, root: Path, tmp_path: Path, overrides: Sequence[str], rank=0, world_size=1
):
    options = ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"]
    options += [
        "global_batch_size=4",
        "data.val_count=6",
        f"data.ignore_index={IGNORED}",
        *overrides,
    ]
    if backend == "packed":
        folder = tmp_path / "pack"
        if not folder.exists():
            pack(make_config(*options).data, folder)
        options.append(f"loader.pack={folder}")
    if backend == "workers":
        backend = "pytorch"
        options.append("loader.num_workers=1")
    return build_loaders(make_config(*options, f"loader={backend}"), CPU, rank, world_size)


PLAIN = ["data.mean=null", "data.std=null"]
TURNED = ["data.rotation=40", "data.random_scale=[0.7,1.4]", "data.gaussian_blur=[0.5,0.5,1]"]
TURNED += ["data.random_erasing=0.5", "data.randaugment=[2,9]", "data.cutmix=1"]
CROPS = ["data.crop=[24,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_is_cut_and_flipped_like_its_image(backend: str, scenes: Path, tmp_path) -> None:
    """To the pixel, on two ranks and over two epochs: the image shows the indices of its mask."""
    seen = []
    for rank in (0, 1):
        train, _ = loaders_of(backend, scenes, tmp_path, [*PLAIN, *CROPS], rank, 2)
        for epoch in (0, 1):
            train.set_epoch(epoch)
            for inputs, masks in train:
                assert masks.dtype == torch.int64
                assert masks.shape == (2, 24, 32)
                assert torch.equal((255 * inputs[:, 0]).round().long(), masks)
                seen += [(epoch, int((255 * image[2, 0, 0]).round())) for image in inputs]
    assert len(seen) == len(set(seen)) == 2 * 12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "resize",
    [
        ["data.resize=30", "data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5"],
        ["data.resize=[88,100]", "data.crop=null", "data.random_crop=false"],
        ["data.random_resized_crop=[0.3,1]", "data.crop=[32,32]"],
    ],
    ids=["reduced", "enlarged", "random resized crop"],
)
def test_no_index_is_new_after_resizing_turning_and_colours(
    backend: str, resize: list[str], scenes: Path, tmp_path
) -> None:
    """A linear mixture of 3 and 7 would be 5; colours and normalisation are of the image alone."""
    colours = ["data.colour_jitter=[0.5,0.5,0.5]", "data.value_range=[-1,1]"]
    train, val = loaders_of(backend, scenes, tmp_path, [*resize, *colours, *TURNED])
    for loader in (train, val):
        found: set[int] = set()
        for _, masks in loader:
            found |= set(masks.unique().tolist())
        assert found == {*INDICES, IGNORED}


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    "options",
    [
        CROPS,
        ["data.resize=30", *CROPS[1:], "data.crop=[24,24]"],
        ["data.resize=[88,100]", "data.crop=null"],
        [*CROPS, *TURNED],
    ],
    ids=["crop", "reduced", "enlarged", "turned"],
)
def test_every_backend_makes_the_same_masks(backend: str, options, scenes: Path, tmp_path) -> None:
    """To the pixel; a pack, which is resized before it is cut, where nothing is resized."""
    first, second = (
        loaders_of(name, scenes, tmp_path / name, options) for name in ("pytorch", backend)
    )
    for split in (0, 1):
        for (_, masks), (_, others) in zip(first[split], second[split], strict=True):
            if backend == "packed" and "data.resize" in " ".join(options):
                assert (masks == others).float().mean() > 0.7
            else:
                assert torch.equal(masks, others)


def test_a_resized_mask_lies_where_its_image_does(scenes: Path, tmp_path) -> None:
    """Enlarged by a whole factor, every pixel of a mask becomes a square of it."""
    _, val = loaders_of("pytorch", scenes, tmp_path, ["data.resize=[120,168]", "data.crop=null"])
    names = val.index.files[1]
    masks = torch.cat([masks for _, masks in val])
    for name, mask in zip(names, masks, strict=True):
        stored = decode_mask(Path(name).read_bytes())[..., 0]
        if stored.shape[0] == 40:
            assert np.array_equal(mask.numpy(), stored.repeat(3, axis=0).repeat(3, axis=1))


def test_synthetic_masks_have_the_shape_and_the_classes(scenes: Path, tmp_path) -> None:
    train, _ = loaders_of("synthetic", scenes, tmp_path, CROPS)
    inputs, masks = next(iter(train))
    assert inputs.shape == (4, 3, 24, 32)
    assert (masks.shape, masks.dtype) == ((4, 24, 32), torch.int64)
    assert set(masks.unique().tolist()) <= set(range(201))


def test_the_target_tells_what_the_masks_are(scenes: Path, tmp_path) -> None:
    train, _ = loaders_of("pytorch", scenes, tmp_path, CROPS)
    target = train.target
    assert isinstance(target, Masks)
    assert (target.kind, target.dtype, target.channels) == ("masks", "int64", 1)
    assert (target.interpolation, target.stored_dtype) == ("nearest", "uint16")
    assert target.classes == tuple(
        map(str, range(201))
    )  # from the masks, without the ignored index
    assert train.description == (
        f"{scenes.name}: 14 training and 6 validation samples, "
        "masks of 201 classes (0, 1, 2, ..., 200)"
    )
    more, _ = loaders_of("pytorch", scenes, tmp_path, [*CROPS, "data.num_classes=210"])
    assert len(more.classes) == 210


def test_a_pack_keeps_indices_and_classes(scenes: Path, tmp_path) -> None:
    packed, _ = loaders_of("packed", scenes, tmp_path, CROPS)
    plain, _ = loaders_of("pytorch", scenes, tmp_path, CROPS)
    assert packed.target == plain.target
    assert np.array_equal(packed.index.class_counts(), plain.index.class_counts())


def test_pixels_of_each_class_are_counted_without_the_ignored(scenes: Path, tmp_path) -> None:
    train, _ = loaders_of("pytorch", scenes, tmp_path, CROPS)
    masks = [decode_mask(Path(name).read_bytes()) for name in train.index.files[1]]
    counts = train.index.class_counts()
    assert counts.shape == (201,)
    for index in INDICES:
        assert counts[index] == sum((mask == index).sum() for mask in masks)
    assert counts.sum() == sum((mask != IGNORED).sum() for mask in masks)


@pytest.mark.parametrize(
    ("form", "expected"), [("P", 9), ("L", 9), ("I;16", 300), ("1", 1), ("tif", 300)]
)
def test_indices_are_read_as_stored(form: str, expected: int, tmp_path) -> None:
    indices = np.zeros((5, 6), np.uint16)
    indices[2, 3] = expected
    path = tmp_path / ("m.tif" if form == "tif" else "m.png")
    if form == "tif":
        tifffile.imwrite(path, indices)
    elif form == "1":
        Image.fromarray(indices.astype(bool)).save(path)
    else:
        save(path, indices if form == "I;16" else indices.astype(np.uint8), palette=form == "P")
    assert np.array_equal(decode_mask(path.read_bytes())[..., 0], indices)


def folder_of(tmp_path: Path, masks: dict[str, Image.Image | np.ndarray]) -> Path:
    root = tmp_path / "data"
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        path = root / "masks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(mask, np.ndarray):
            save(path, mask)
        else:
            mask.save(path)
    return root


def filled(value: int, height: int = 8, width: int = 10) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[0, 0] = value
    return mask


@pytest.mark.parametrize(
    ("masks", "overrides", "message"),
    [
        ({"a.png": filled(255), "b.png": filled(1)}, [], "up to 255.*a.png.*data.ignore_index=255"),
        (
            {"a.png": filled(4), "b.png": filled(1)},
            ["data.num_classes=3"],
            "1 of 2 masks have indices up to 4, above those of data.num_classes=3: .*a.png; raise it",
        ),
        (
            {"a.png": filled(0), "b.png": filled(0)},
            [],
            "hold no class above 0; set data.num_classes",
        ),
        ({"a.png": filled(1, 8, 9), "b.png": filled(1)}, [], r"a.png \(8x9\) of .*a.png \(8x10\)"),
        (
            {"a.png": Image.new("RGB", (10, 8)), "b.png": filled(1)},
            [],
            "a.png .is a PNG of mode RGB; store class indices as a PNG or TIFF",
        ),
        (
            {"a.jpg": Image.new("L", (10, 8)), "b.png": filled(1)},
            [],
            "a.jpg .is a JPEG, which changes",
        ),
        (
            {"a.tif": np.zeros((8, 10), np.float32), "b.png": filled(1)},
            [],
            "a.tif .is a shape .8, 10. of float32; store class indices",
        ),
    ],
)
def test_wrong_masks_are_named_at_start(masks, overrides, message: str, tmp_path) -> None:
    root = folder_of(tmp_path, masks)
    options = ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}", "data.val_count=1"]
    with pytest.raises(ValueError, match=message):
        build_index(make_config(*options, *overrides).data)


def test_a_mask_without_an_image_is_named(scenes: Path, tmp_path) -> None:
    root = folder_of(tmp_path, {"a.png": filled(1), "b.png": filled(1)})
    (root / "images" / "b.png").unlink()
    with pytest.raises(ValueError, match="1 images in .* have no partner: .*masks/b.png"):
        build_index(
            make_config("data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}").data
        )


@pytest.mark.parametrize("backend", ["pytorch", "workers", "dali"])
def test_a_damaged_mask_is_skipped_or_named(backend: str, tmp_path) -> None:
    masks: dict[str, Image.Image | np.ndarray] = {f"{n}.png": filled(1) for n in range(12)}
    root = folder_of(tmp_path, masks)
    options = ["data.crop=[8,10]", "data.ignore_index=-100", "data.val_count=4"]
    loaders_of(backend, root, tmp_path, options)  # keeps what the headers say
    skipping = [*options, "data.on_error=skip"]
    train, _ = loaders_of(backend, root, tmp_path, options)
    skip, _ = loaders_of(backend, root, tmp_path, skipping)
    path = Path(train.index.files[1][3])
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    with pytest.raises(OSError, match=f"{path} has changed"):
        list(train)
    assert sum(len(inputs) for inputs, _ in skip) == 8
    assert list(skip.sampler.bad) == [3]


def test_dalis_own_reader_refuses_masks(scenes: Path, tmp_path) -> None:
    with pytest.raises(
        ValueError, match="reader=native does not have masks; use loader.reader=plan"
    ):
        loaders_of("dali", scenes, tmp_path, [*CROPS, "loader.reader=native"])


def test_check_decodes_masks_as_masks(tmp_path) -> None:
    root = folder_of(tmp_path, {"a.png": Image.new("RGB", (10, 8)), "b.png": filled(1)})
    options = ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}", "data.val_count=1"]
    num_files, problems = check(make_config(*options).data)
    assert num_files == 4
    [(path, reason)] = problems.items()
    assert path.endswith("masks/a.png")
    assert "of mode RGB; store class indices" in reason


# training


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> list[str]:
    """Options of 36 noisy images with bright squares (1) whose left neighbours are dark ones (2)."""
    root, random = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for number in range(36):
        image, mask = random.normal(100, 15, (32, 32, 3)), np.zeros((32, 32), np.uint8)
        y, x = random.integers(0, 20, 2)
        for index, value in ((1, 200), (2, 20)):
            place = (slice(y, y + 12), slice(x + 6 * (2 - index), x + 6 * (3 - index)))
            image[place], mask[place] = value, index
        mask[:2] = IGNORED
        save(root / "images" / f"{number:02d}.png", image.clip(0, 255).astype(np.uint8))
        save(root / "masks" / f"{number:02d}.png", mask, palette=True)
    return [
        *("data=masks", f"data.root={root}", f"data.cache_dir={root / 'cache'}"),
        *(
            "data.crop=[32,32]",
            "data.vflip=0.5",
            f"data.ignore_index={IGNORED}",
            "data.val_count=9",
        ),
        *("task=segmentation", "model=unet", "model.kwargs.width=8", "model.kwargs.num_levels=2"),
        *("global_batch_size=8", "epochs=8", "optimizer.lr=0.01", "loss.weights=auto"),
    ]


def test_train_learns_to_segment_and_shows_it(squares: list[str], tmp_path) -> None:
    options = [*squares, "epochs=20", "model.kwargs.batch_norm=false"]
    printed = train("train.py", tmp_path / "run", *options)
    assert "masks of 3 classes (0, 1, 2)" in printed
    summary = summary_of(tmp_path / "run")
    assert summary["val/miou"] > 0.8
    assert summary["val/pixel_accuracy"] > 0.95
    tags = events_of(tmp_path / "run").Tags()["images"]
    assert tags == ["train/inputs", "val/image", "val/mask", "val/prediction"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_entry_point_segments(script: str, squares: list[str], tmp_path) -> None:
    options = [*squares, "epochs=1", "max_steps=2", "model.kwargs.num_levels=3"]
    train(script, tmp_path / "run", *options)
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 2
    tolerance = 0.05 if "amp" in script else 1e-4
    for name, value in validated(published(tmp_path / "run"), options).items():
        assert summary[name] == pytest.approx(value, abs=tolerance), name
    tags = events_of(tmp_path / "run").Tags()["images"]
    assert tags == ["train/inputs", "val/image", "val/mask", "val/prediction"]


def test_two_ranks_segment_like_one_process(squares: list[str], tmp_path) -> None:
    """And their 9 validation images, 5 and 4 of them, give the metrics of all 9."""
    options = [*squares, "model.kwargs.batch_norm=false", "epochs=2", "optimizer.lr=0.001"]
    for script in ("train.py", "train_ddp.py"):
        train(script, tmp_path / script, *options)
    one, two = (summary_of(tmp_path / script) for script in ("train.py", "train_ddp.py"))
    for name in ("val/loss", "val/miou", "val/pixel_accuracy"):
        assert two[name] == pytest.approx(one[name], abs=1e-3), name
    weights = [checkpoint_of(tmp_path / script)["model"] for script in ("train.py", "train_ddp.py")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-3, rtol=0)
