"""Every data set in every backend: the same samples, rectangles, flips and pixels."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from loaders import build_loaders, decode
from loaders.layouts import build_index
from loaders.pack import pack
from tests.helpers import make_config

CPU = torch.device("cpu")
BACKENDS = ["pytorch", "dali", "packed"]
DEBLUR = ("data=pairs", "data.input_dir=blurry", "data.target_dir=sharp")


def smooth(number: int, height: int, width: int) -> np.ndarray:
    """A (height, width, 3) photograph-like image: waves and a gradient, other ones for each number."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (9 + c + number) + number) * np.cos(y / (13 + c)) for c in range(3)]
    image = 128 + 80 * np.stack(waves, axis=-1) + 30 * (x / width)[..., None]
    return image.clip(0, 255).astype(np.uint8)


def positions(height: int, width: int) -> np.ndarray:
    """(height, width, 3): red is the row, green the column, so that a pixel tells where it was."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, np.zeros_like(x)], axis=-1).astype(np.uint8)


def save(path: Path, image: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """24 JPEGs, PNGs, WebPs and BMPs of various sizes in three class folders."""
    root = tmp_path_factory.mktemp("photos")
    endings = ["jpg", "png", "webp", "bmp"]
    for number in range(24):
        image = smooth(number, 70 + 3 * number, 120 - 2 * number)
        options = {"lossless": True} if number % 4 == 2 else {}
        save(
            root / f"class {number % 3}" / f"bild-ä {number}.{endings[number % 4]}",
            image,
            **options,
        )
    return root


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """{train,test}/{blurry,sharp}/<scene>/<image>: 16 and 7 pairs whose pixels tell their position."""
    root = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 16), ("test", 7)):
        for number in range(count):
            image = positions(40 + number, 60)
            image[..., 2] = number
            for side, shift in (("blurry", 0), ("sharp", 100)):
                marked = image.copy()
                marked[..., 2] += shift
                save(root / split / side / f"scene{number % 2}" / f"{number:03d}.png", marked)
    return root


def loaders_of(
    backend: str, tmp_path: Path, overrides: list[str], rank: int = 0, world_size: int = 1
):
    options = ["global_batch_size=4", f"data.cache_dir={tmp_path / 'cache'}", *overrides]
    if backend == "packed":
        folder = tmp_path / "pack"
        if not folder.exists():
            pack(make_config(*options).data, folder)
        options.append(f"loader.pack={folder}")
    return build_loaders(make_config(*options, f"loader={backend}"), CPU, rank, world_size)


PHOTO_OPTIONS = {
    "evaluation crop": ["data.resize=64", "data.crop=[48,48]"],
    "random crop": ["data.resize=null", "data.crop=[64,64]", "data.random_crop=true"],
    "random resized crop": [
        "data.resize=null",
        "data.crop=[48,56]",
        "data.random_resized_crop=[0.3,1]",
    ],
    "everything": [
        "data.resize=72",
        "data.crop=[60,52]",
        "data.random_crop=true",
        "data.hflip=0.5",
        "data.vflip=0.5",
        "data.colour_jitter=[0.3,0.3,0.3]",
        *("data.rotation=20", "data.random_scale=[0.9,1.2]", "data.gaussian_blur=[0.5,0.5,1]"),
        *("data.random_erasing=0.5", "data.mixup=0.4", "data.cutmix=1"),
    ],
}


@pytest.mark.parametrize("name", PHOTO_OPTIONS)
def test_backends_agree_on_photos(name: str, photos: Path, tmp_path: Path) -> None:
    """Identities exactly; pixels within 4 of 255 and 0.6 on average where both decode the original.
    A pack was rounded to 8 bits and whole pixels before the crop: within 4 of 255 on average."""
    overrides = [
        "data=imagefolder",
        f"data.root={photos}",
        "data.val_fraction=0.3",
        "data.mean=null",
        "data.std=null",
        *PHOTO_OPTIONS[name],
    ]
    all_loaders = {backend: loaders_of(backend, tmp_path, overrides) for backend in BACKENDS}
    for both in all_loaders.values():
        assert both[0].classes == both[1].classes == ("class 0", "class 1", "class 2")
    exact_pack = "data.resize=null" in overrides
    for split, count in ((0, 17), (1, 7)):
        for epoch in (0, 1):
            batches = {}
            for backend, both in all_loaders.items():
                both[split].set_epoch(epoch)
                batches[backend] = list(both[split])
            for number, (inputs, labels) in enumerate(batches["pytorch"]):
                for backend in ("dali", "packed"):
                    other_inputs, other_labels = batches[backend][number]
                    assert torch.equal(labels, other_labels)
                    difference = 255 * (inputs - other_inputs).abs()
                    if backend == "packed" and exact_pack:
                        assert difference.max() == 0
                    elif backend == "packed":
                        assert difference.mean() < 4
                    else:
                        assert difference.max() <= 4
                        assert difference.mean() < 0.6
            seen = sum(len(inputs) for inputs, _ in batches["pytorch"])
            assert seen == (count if split else count - count % 4)


def rectangle_of(image: torch.Tensor) -> tuple[int, int, bool, bool]:
    """(y, x, hflip, vflip) that the pixels of `positions()` tell; the rectangle must be whole."""
    rows, columns = (255 * image[0]).round().int(), (255 * image[1]).round().int()
    vflip, hflip = bool(rows[0, 0] > rows[-1, 0]), bool(columns[0, 0] > columns[0, -1])
    height, width = rows.shape
    y, x = int(rows.min()), int(columns.min())
    down = torch.arange(y, y + height).flip(0) if vflip else torch.arange(y, y + height)
    along = torch.arange(x, x + width).flip(0) if hflip else torch.arange(x, x + width)
    assert torch.equal(rows, down[:, None].expand(height, width).int())
    assert torch.equal(columns, along[None].expand(height, width).int())
    return y, x, hflip, vflip


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_stay_aligned_and_follow_the_plan(backend: str, pairs: Path, tmp_path: Path) -> None:
    """Over two epochs and two ranks, with a restart in the middle of each; to the pixel."""
    overrides = [
        *DEBLUR,
        f"data.root={pairs}",
        "data.crop=[24,32]",
        "data.value_range=[0,1]",
        "global_batch_size=4",
    ]
    visited = []
    for epoch in (0, 1):
        for rank in (0, 1):
            train, _ = loaders_of(backend, tmp_path, overrides, rank, 2)
            train.set_epoch(epoch)
            plan = train.sampler.plan(np.arange(rank, train.sampler.num_rows, 2))
            got = []
            for part in (0, 1):
                for number, (inputs, targets) in enumerate(train):
                    for image, target in zip(inputs, targets, strict=True):
                        assert rectangle_of(image) == rectangle_of(target)
                        sample = int((255 * image[2, 0, 0]).round())
                        assert int((255 * target[2, 0, 0]).round()) == sample + 100
                        got.append((sample, *rectangle_of(image)))
                    if part == 0 and number == 1:
                        break
                if part == 0:
                    state = train.state_dict()
                    train, _ = loaders_of(backend, tmp_path, overrides, rank, 2)
                    train.load_state_dict(state)
            names = build_index(train.cfg.data)[0].files[0]
            expected = [
                (int(Path(names[row["sample"]]).stem), *row[["y", "x", "hflip", "vflip"]].item())
                for row in plan
            ]
            assert got == expected
            visited += [(epoch, sample) for sample, *_ in got]
    assert len(set(visited)) == len(visited) == 32


@pytest.mark.parametrize("backend", BACKENDS)
def test_super_resolution_pairs_cut_the_same_place(backend: str, tmp_path: Path) -> None:
    for number in range(10):
        large = smooth(number, 96, 120)
        small = np.asarray(Image.fromarray(large).resize((60, 48), Image.Resampling.BOX))
        save(tmp_path / "sr" / "high" / f"{number}.png", large)
        save(tmp_path / "sr" / "low" / f"{number}.png", small)
    overrides = [
        "data=pairs",
        f"data.root={tmp_path / 'sr'}",
        "data.input_dir=low",
        "data.target_dir=high",
        "data.crop=[20,24]",
        "data.val_count=2",
    ]
    train, val = loaders_of(backend, tmp_path, overrides)
    assert len(val.index) == 2
    for inputs, targets in train:
        assert inputs.shape[1:] == (3, 20, 24)
        assert targets.shape[1:] == (3, 40, 48)
        reduced = torch.nn.functional.avg_pool2d(targets, 2)
        assert (inputs - reduced).abs().max() < 1.5 * 2 / 255


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("planar", [False, True], ids=["interleaved", "planar"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("channels", [1, 3, 5, 7])
def test_tiffs_of_any_kind_are_read_right(channels, dtype, planar, backend, tmp_path) -> None:
    random = np.random.default_rng(0)
    images = {}
    for number in range(8):
        shape = (12, 14, channels)
        image = random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
        path = tmp_path / "tiffs" / f"c{number % 2}" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = image[..., 0] if channels == 1 else np.moveaxis(image, -1, 0) if planar else image
        tifffile.imwrite(
            path,
            stored,
            planarconfig=None if channels == 1 else "separate" if planar else "contig",
            photometric="minisblack",
            compression=[None, "deflate", "lzw"][number % 3],
            predictor=number % 3 == 2,
            extrasamples=[0] * (channels - 1) if channels > 1 else None,
        )
        images[str(path)] = image
    overrides = ["data=cells", f"data.root={tmp_path / 'tiffs'}", "data.mean=null", "data.std=null"]
    overrides.append("data.val_fraction=0.5")
    if dtype == "uint16" and backend == "pytorch":
        overrides += ["loader.num_workers=1"]
    _, val = loaders_of(backend, tmp_path, overrides)
    assert (val.in_channels, val.index.dtype) == (channels, dtype)
    names = build_index(make_config(*overrides).data)[1].files[0]
    got = torch.cat([inputs for inputs, _ in val])
    assert len(got) == 4
    for name, image in zip(names, got, strict=True):
        expected = images[name].astype(np.float32) / np.iinfo(dtype).max
        assert np.allclose(image.permute(1, 2, 0).numpy(), expected, atol=1e-6), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_tiffs_are_enlarged_alike(backend: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / "tiffs" / f"c{number % 2}" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = random.integers(0, 255, (50, 50, 5), dtype=np.uint8, endpoint=True)
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    overrides = [
        "data=cells",
        "data.resize=[220,224]",
        "data.crop=[220,220]",
        f"data.root={tmp_path / 'tiffs'}",
        "data.val_fraction=0.5",
    ]
    overrides += ["data.mean=null", "data.std=null"]
    _, val = loaders_of(backend, tmp_path, overrides)
    inputs, _ = next(iter(val))
    assert inputs.shape == (4, 5, 220, 220)
    for name, got in zip(build_index(val.cfg.data)[1].files[0], inputs, strict=False):
        source = torch.from_numpy(tifffile.imread(name).astype(np.float32)).permute(2, 0, 1)[None]
        # 220 of 224 columns are 49 of the source's 50.
        expected = torch.nn.functional.interpolate(source[..., :49], (220, 220), mode="bilinear")
        if backend != "packed":
            assert torch.allclose(255 * got, expected[0], atol=1e-3)
        assert got.std() > 0.1


@pytest.mark.parametrize(
    "options", [["data.resize=[32,40]", "data.crop=[30,36]"], ["data.random_resized_crop=[0.5,1]"]]
)
def test_tiffs_of_16_bits_are_reduced_alike(options: list[str], tmp_path: Path) -> None:
    for number in range(12):
        image = 257 * smooth(number, 60, 70).astype(np.uint16)
        path = tmp_path / "tiffs" / f"c{number % 2}" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image, photometric="rgb")
    overrides = ["data=cells", f"data.root={tmp_path / 'tiffs'}", "data.val_fraction=0.5"]
    overrides += ["data.crop=[20,24]", "data.hflip=0.5", "data.vflip=0.5", *options]
    overrides += ["data.mean=null", "data.std=null"]
    splits = zip(
        *(loaders_of(backend, tmp_path, overrides) for backend in ("pytorch", "dali")), strict=True
    )
    for both in splits:
        for (inputs, labels), (other_inputs, other_labels) in zip(*both, strict=True):
            assert torch.equal(labels, other_labels)
            difference = 255 * (inputs - other_inputs).abs()
            assert difference.max() < 2
            assert difference.mean() < 0.1


@pytest.mark.parametrize("options", [["loader.num_workers=2"], ["loader.num_threads=3"], []])
def test_processes_and_threads_give_the_same_batches(options, photos: Path, tmp_path: Path) -> None:
    overrides = ["data=imagefolder", f"data.root={photos}", "data.crop=[48,48]", "data.resize=64"]
    reference, _ = loaders_of("pytorch", tmp_path, [*overrides, "loader.num_threads=1"])
    other, _ = loaders_of("pytorch", tmp_path, [*overrides, *options])
    for (inputs, labels), (others, other_labels) in zip(reference, other, strict=True):
        assert torch.equal(inputs, others)
        assert torch.equal(labels, other_labels)


def test_folders_train_and_test_are_the_splits(pairs: Path, tmp_path: Path) -> None:
    data = make_config(*DEBLUR, f"data.root={pairs}", f"data.cache_dir={tmp_path}").data
    train, val = build_index(data)
    assert (len(train), len(val)) == (16, 7)
    assert all("/train/blurry/" in name for name in train.files[0])
    assert all("/test/sharp/" in name for name in val.files[1])


def test_a_seeded_split_is_disjoint_and_stays(photos: Path, tmp_path: Path) -> None:
    options = ["data=imagefolder", f"data.root={photos}", f"data.cache_dir={tmp_path}"]
    splits = [build_index(make_config(*options, seed).data) for seed in ("seed=0", "seed=1")]
    assert list(splits[0][1].files[0]) == list(splits[1][1].files[0])
    train, val = splits[0]
    assert len(train) + len(val) == 24
    assert not set(train.files[0]) & set(val.files[0])
    other = build_index(make_config(*options, "data.split_seed=1").data)
    assert list(other[1].files[0]) != list(val.files[0])
    assert len(build_index(make_config(*options, "data.val_count=5").data)[1]) == 5


def test_exif_rotation_is_the_same_in_every_backend(tmp_path: Path) -> None:
    for number, orientation in enumerate([1, 3, 6, 8] * 2):
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(tmp_path / "r" / "a" / f"{number}.jpg", smooth(number, 64, 96), quality=95, exif=exif)
    overrides = ["data=imagefolder", f"data.root={tmp_path / 'r'}", "data.resize=null"]
    overrides += ["data.crop=[60,60]", "data.val_fraction=0.5"]
    batches = [list(loaders_of(backend, tmp_path, overrides)[1]) for backend in BACKENDS]
    names = build_index(make_config(*overrides, f"data.cache_dir={tmp_path}").data)[1].files[0]
    for name, inputs in zip(names, batches[0][0][0], strict=True):
        upright = Image.open(name)
        from PIL import ImageOps

        image = np.asarray(ImageOps.exif_transpose(upright).convert("RGB"))
        y, x = (image.shape[0] - 60) // 2, (image.shape[1] - 60) // 2
        expected = torch.from_numpy(image[y : y + 60, x : x + 60].copy()).permute(2, 0, 1) / 255
        mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        assert (inputs * std + mean - expected).abs().max() < 3 / 255
    for other in batches[1:]:
        assert (other[0][0] - batches[0][0][0]).abs().max() < 4 / 255 / 0.224


@pytest.mark.parametrize("kind", ["cmyk", "grey", "palette", "alpha", "16 bit", "grey jpeg"])
def test_every_kind_of_photo_becomes_rgb_alike(kind: str, tmp_path: Path) -> None:
    rgb = Image.fromarray(smooth(1, 64, 64))
    for number in range(10):
        path = tmp_path / "k" / "a" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "cmyk":
            rgb.convert("CMYK").save(path.with_suffix(".jpg"), quality=95)
        elif kind == "grey jpeg":
            rgb.convert("L").save(path.with_suffix(".jpg"), quality=95)
        elif kind == "16 bit":
            deep = np.asarray(rgb.convert("L")).astype(np.uint16) * 257
            Image.fromarray(deep).save(path.with_suffix(".png"))
        else:
            mode = {"grey": "L", "palette": "P", "alpha": "RGBA"}[kind]
            rgb.convert(mode).save(path.with_suffix(".png"))
    overrides = ["data=imagefolder", f"data.root={tmp_path / 'k'}", "data.resize=null"]
    overrides += ["data.crop=[64,64]", "data.mean=null", "data.std=null", "data.val_fraction=0.5"]
    images = [next(iter(loaders_of(b, tmp_path, overrides)[1]))[0] for b in BACKENDS]
    assert images[0].std() > 0.1
    for other in images[1:]:
        assert (images[0] - other).abs().max() <= (16 if kind == "cmyk" else 2) / 255


@pytest.mark.parametrize("transparent", [None, (1, 2, 3)])
def test_an_rgb_png_is_decoded_exactly(
    transparent: tuple[int, int, int] | None, tmp_path: Path
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (37, 50, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "whole.png", transparency=transparent)
    assert np.array_equal(decode.decode_photo((tmp_path / "whole.png").read_bytes()), image)
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match="truncated"):
        decode.decode_photo((tmp_path / "cut.png").read_bytes())


def test_upper_lines_of_a_png_are_right_or_its_damage_is_seen(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 4, (12, 10, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(image).save(path)
    content = path.read_bytes()
    for num_lines in (1, 5, 12, 13):
        found = decode.decode_photo(path.read_bytes(), num_lines=num_lines)
        assert np.array_equal(found, image[:num_lines])
    num_errors = 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        try:
            found = decode.decode_photo(path.read_bytes(), num_lines=5)
        except (OSError, SyntaxError):
            num_errors += 1
        else:
            assert np.array_equal(found[:5], image[:5]), at
    assert num_errors > 0.8 * len(content)


@pytest.mark.parametrize(("stopped_at", "num_left"), [(12, 14), (24, 2)], ids=["train", "val"])
def test_packing_goes_on_where_it_was_stopped(
    stopped_at: int, num_left: int, photos: Path, tmp_path: Path, monkeypatch
) -> None:
    import loaders.pack

    options = ["data=imagefolder", f"data.root={photos}", "data.resize=40", "data.crop=[32,32]"]
    data = make_config(*options, f"data.cache_dir={tmp_path}").data
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pack(data, whole)
    read, calls = loaders.pack.Index.read, []

    def read_or_fail(self, sample, *arguments):
        calls.append(sample)
        if len(calls) == stopped_at:
            raise OSError("interrupted")
        return read(self, sample, *arguments)

    monkeypatch.setattr(loaders.pack.Index, "read", read_or_fail)
    monkeypatch.setattr(loaders.pack, "CHUNK", 5)
    with pytest.raises(OSError, match="interrupted"):
        pack(data, stopped)
    with pytest.raises(FileNotFoundError, match="is no finished pack"):
        options_now = [*options, "loader=packed", f"loader.pack={stopped}"]
        build_loaders(make_config(*options_now, f"data.cache_dir={tmp_path}"), CPU)
    before = len(calls)
    pack(data, stopped)
    assert len(calls) - before <= num_left
    for name in ("train-0.npy", "val-0.npy"):
        assert np.array_equal(np.load(whole / name), np.load(stopped / name))
    assert {path.name for path in stopped.iterdir()} == {path.name for path in whole.iterdir()}
    assert not list(whole.glob("*-done.npy"))


def test_a_pack_for_which_there_is_no_room_says_so(
    photos: Path, tmp_path: Path, monkeypatch
) -> None:
    options = ["data=imagefolder", f"data.root={photos}", "data.resize=40", "data.crop=[32,32]"]
    data, out = make_config(*options, f"data.cache_dir={tmp_path}").data, tmp_path / "out"
    taken = []

    def take(file: int, start: int, size: int) -> None:
        taken.append(size)
        if len(taken) == 4:  # the pixels of val
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", take)
        message = rf"out={out}: No space left on device: val-0.npy needs .* GB, and .* GB are free"
        with pytest.raises(OSError, match=message):
            pack(data, out)
    assert not list(out.glob("*.partial"))
    assert taken[1] == (out / "train-0.npy").stat().st_size
    pack(data, out)
    assert (out / "val-0.npy").stat().st_blocks * 512 >= taken[3]


def test_a_pack_is_refused_with_other_settings_or_data(photos: Path, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "copy"
    shutil.copytree(photos, root)
    options = ["data=imagefolder", f"data.root={root}", "data.crop=[32,32]", "global_batch_size=4"]
    options += [f"data.cache_dir={tmp_path}", "loader=packed"]
    out = tmp_path / "out"
    options.append(f"loader.pack={out}")
    pack(make_config(*options, "data.resize=40").data, out)
    build_loaders(make_config(*options, "data.resize=40"), CPU)
    with pytest.raises(ValueError, match=r"other settings: data.resize=48 \(there: 40\)"):
        build_loaders(make_config(*options, "data.resize=48"), CPU)
    with pytest.raises(ValueError, match="holds a pack of other data or settings"):
        pack(make_config(*options, "data.resize=48").data, out)
    (next(root.glob("class 0/*"))).unlink()
    with pytest.raises(ValueError, match="is not what .* was made from"):
        build_loaders(make_config(*options, "data.resize=40"), CPU)
    shutil.rmtree(root)
    build_loaders(make_config(*options, "data.resize=40"), CPU)


def test_bad_folders_are_refused_with_names(tmp_path: Path) -> None:
    def index_of(name: str, *options: str):
        root = tmp_path / name
        return build_index(
            make_config(*options, f"data.root={root}", f"data.cache_dir={tmp_path}").data
        )

    with pytest.raises(FileNotFoundError, match="data.root=.*nowhere is not a folder"):
        index_of("nowhere", "data=imagefolder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no class folders; expected"):
        index_of("empty", "data=imagefolder")
    save(tmp_path / "gap" / "a" / "1.png", smooth(0, 8, 8))
    (tmp_path / "gap" / "b").mkdir()
    with pytest.raises(ValueError, match="1 class folders without an image .*: b; remove"):
        index_of("gap", "data=imagefolder")

    for number in range(13):
        save(tmp_path / "p" / "input" / f"{number:02d}.png", smooth(0, 8, 8))
    save(tmp_path / "p" / "target" / "00.png", smooth(0, 8, 8))
    save(tmp_path / "p" / "target" / "99.png", smooth(0, 8, 8))
    with pytest.raises(ValueError, match="13 images in .* have no partner: .*01.png.* and 3 more"):
        index_of("p", "data=pairs")
    with pytest.raises(FileNotFoundError, match="hazy is not a folder; expected"):
        index_of("p", "data=pairs", "data.input_dir=hazy")
    third = "data.val_fraction=0.34"
    for name in ("a", "b", "c", "d", "e", "f"):
        save(tmp_path / "q" / "input" / f"{name}.png", smooth(0, 8, 8))
        save(tmp_path / "q" / "target" / f"{name}.png", smooth(0, 8, 9 if name == "b" else 8))
    with pytest.raises(
        ValueError, match=r"1 pairs .*input/b.png \(8x8\) and .*target/b.png \(8x9\)"
    ):
        index_of("q", "data=pairs", third)

    (tmp_path / "gap" / "b").rmdir()
    (tmp_path / "gap" / "a" / "2.jpg").write_text("<html>not found</html>")
    (tmp_path / "gap" / "a" / "3.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="2 of 3 files cannot be used: .*2.jpg .*3.jpg"):
        index_of("gap", "data=imagefolder")
    with pytest.raises(ValueError, match="8x8 pixels are more than data.max_pixels=10"):
        index_of("q", "data=pairs", third, "data.max_pixels=10")
    (tmp_path / "gap" / "a" / "loop").symlink_to(tmp_path / "gap")
    with pytest.raises(ValueError, match="loop is one of its own parent folders, through a link"):
        index_of("gap", "data=imagefolder")
    (tmp_path / "gap" / "a" / "loop").unlink()
    for name, target in (("a", "b/inner"), ("b/inner", "a")):  # each leads into the other one
        (tmp_path / "gap" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "gap" / name / "other").symlink_to(tmp_path / "gap" / target)
    with pytest.raises(ValueError, match="a/other/other is one of its own parent folders"):
        index_of("gap", "data=imagefolder")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dalis_own_reader_repeats_nothing_and_drops_the_tail(
    world_size: int, pairs: Path, tmp_path
) -> None:
    """16 pairs, batches of 6: over 4 epochs every rank has 2 batches and no sample comes twice; inputs
    and targets stay aligned, and an epoch that was left early does not leak into the next."""
    overrides = [*DEBLUR, f"data.root={pairs}", "data.crop=[24,32]"]
    overrides += ["data.value_range=[0,1]", "loader.reader=native"]
    ranks = [
        loaders_of("dali", tmp_path, [*overrides, "global_batch_size=6"], rank, world_size)[0]
        for rank in range(world_size)
    ]
    orders = []
    for epoch in range(4):
        seen = []
        for train in ranks:
            train.set_epoch(epoch)
            batches = []
            for number, (inputs, targets) in enumerate(train):
                for image, target in zip(inputs, targets, strict=True):
                    assert rectangle_of(image) == rectangle_of(target)
                    batches.append(int((255 * image[2, 0, 0]).round()))
                    assert int((255 * target[2, 0, 0]).round()) == batches[-1] + 100
                if epoch == 2 and number == 0:
                    break
            assert len(batches) == (6 if epoch == 2 else 12) // world_size
            seen += batches
        assert len(set(seen)) == len(seen)
        orders.append(seen)
    assert orders[0] != orders[1] != orders[3]


def test_dalis_own_reader_draws_the_same_from_the_same_seed(tmp_path: Path) -> None:
    for number in range(8):
        save(tmp_path / "x" / "ab"[number % 2] / f"{number}.png", positions(40, 60))
    overrides = ["data=imagefolder", f"data.root={tmp_path / 'x'}", "data.crop=[24,32]"]
    overrides += ["data.resize=null", "data.random_resized_crop=null", "data.random_crop=true"]
    overrides += ["data.colour_jitter=[0,0,0]", "data.hflip=0.5", "data.vflip=0.5", "seed=3"]
    overrides += ["loader.reader=native", "data.mean=null", "data.std=null", "data.val_count=2"]

    def drawn(rank: int, *options: str) -> list[tuple[int, int, bool, bool]]:
        train, _ = loaders_of("dali", tmp_path, [*overrides, *options], rank, 2)
        return [rectangle_of(image) for inputs, _ in train for image in inputs]

    assert drawn(0) == drawn(0)
    assert drawn(1) == drawn(1)
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, "seed=4")


def test_dalis_own_reader_says_what_it_cannot_do(pairs: Path, photos: Path, tmp_path: Path) -> None:
    native = ["loader.reader=native", "data.resize=null"]
    photo = ["data=imagefolder", f"data.root={photos}", "data.crop=[32,32]", *native]
    with pytest.raises(
        ValueError, match=r"does not have data.colour_jitter; use loader.reader=plan"
    ):
        loaders_of("dali", tmp_path, [*photo, "data.colour_jitter=[0.1,0,0]"])
    with pytest.raises(ValueError, match=r"does not have data.rotation, data.mixup; use"):
        loaders_of("dali", tmp_path, [*photo, "data.rotation=5", "data.mixup=1"])
    train, val = loaders_of("dali", tmp_path, photo)
    assert type(val).__name__ == "DALILoader"
    next(iter(train))
    with pytest.raises(ValueError, match="cannot go on in the middle of an epoch"):
        train.load_state_dict(train.state_dict())
