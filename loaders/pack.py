"""Decode and resize a data set once, ahead of training.

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos data.resize=256 loader=packed loader.pack=data/packed

`format=pixels` (default) writes a memory-mapped store for `loader=packed`, `format=jpeg` resized JPEG
files with the folders of the original, which take less space and which every loader reads as
`data.root=DIR` (quality 95, without `data.resize`). Started again, it goes on where it was stopped.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import torch
from filelock import FileLock
from hydra import compose, initialize_config_dir
from PIL import Image
from torch.nn.functional import interpolate
from tqdm import tqdm

from conf.schema import Config, DataConfig
from loaders.index import Index, Labels
from loaders.layouts import build_index
from loaders.limits import cpus_per_rank
from loaders.packed import SPLITS, describe_split, settings_of
from loaders.plan import resized_sizes

FORMATS = ("pixels", "jpeg")


def pack(data: DataConfig, out: Path, format: str = "pixels") -> None:
    """Write the data set, resized by `data.resize`, into the folder `out`.

    Raises:
        ValueError: the format is unknown or cannot hold these images, or `out` holds a pack of other data.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format} is unknown; use one of {', '.join(FORMATS)}")
    indexes = dict(zip(SPLITS, build_index(data), strict=True))
    description = {
        "format": format,
        "settings": settings_of(data),
        "splits": {split: describe_split(index) for split, index in indexes.items()},
    }
    text = json.dumps(description, indent=2) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    begun, finished = out / "unfinished.json", out / "pack.json"
    with FileLock(out / ".lock"):
        for path in (begun, finished):
            if path.exists() and path.read_text() != text:
                raise ValueError(
                    f"{out} holds a pack of other data or settings; choose another out=DIR"
                )
        if finished.exists():
            print(f"{out} is packed already")
            return
        begun.write_text(text)
        for split, index in indexes.items():
            if format == "pixels":
                _pack_pixels(data, index, out, split)
            else:
                _pack_jpeg(data, index, out, split)
        begun.rename(finished)


def _pack_pixels(data: DataConfig, index: Index, out: Path, split: str) -> None:
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64) * index.channels
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    arrays = {"sizes": sizes, "offsets": offsets}
    if isinstance(index.target, Labels):
        arrays["labels"] = index.target.values
    np.savez(out / f"{split}.npz", **arrays)  # type: ignore[arg-type]
    done = _open(out / f"{split}-done.npy", (len(index),), "bool")
    pixels = [
        _open(out / f"{split}-{side}.npy", (int(lengths.sum()) * factor**2,), index.dtype)
        for side, factor in enumerate(index.size_factors)
    ]

    def write(sample: int) -> None:
        for side, factor in enumerate(index.size_factors):
            image = resized(index.read(sample, side), *(factor * sizes[sample]))
            start = offsets[sample] * factor**2
            pixels[side][start : start + image.size] = image.ravel()

    def remember(samples: list[int]) -> None:
        for array in pixels:
            array.flush()  # the pixels first: what counts as done must be on the disk
        done[samples] = True
        done.flush()

    _run(write, np.flatnonzero(~done).tolist(), f"packing {index.name}", remember)
    (out / f"{split}-done.npy").unlink()


def _pack_jpeg(data: DataConfig, index: Index, out: Path, split: str) -> None:
    if index.as_stored or not index.files:
        raise ValueError(
            f"format=jpeg holds 8-bit RGB files only, not {index.name}; use format=pixels"
        )
    sizes = resized_sizes(data, index.sizes)
    targets = []
    for side, paths in enumerate(index.files):
        folder = out / split
        if len(index.files) > 1:
            folder /= (data.input_dir, data.target_dir)[side]
        root = _folder_of(paths, data, side)
        targets.append(
            [folder / Path(os.path.relpath(path, root)).with_suffix(".jpg") for path in paths]
        )

    def write(sample: int) -> None:
        for side, factor in enumerate(index.size_factors):
            target = targets[side][sample]
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            image = resized(index.read(sample, side), *(factor * sizes[sample]))
            temporary = target.with_name(f".{target.name}")
            Image.fromarray(image).save(temporary, "JPEG", quality=95, subsampling=0)
            temporary.rename(target)

    _run(write, list(range(len(index))), f"packing {index.name}", lambda samples: None)


def _folder_of(paths: list[str], data: DataConfig, side: int) -> Path:
    """The folder below which the paths tell class or partner."""
    root = Path(data.root)
    for name in ("train", "val", "test"):
        if Path(paths[0]).is_relative_to(root / name):
            root /= name
            break
    return root / (data.input_dir, data.target_dir)[side] if data.layout == "pairs" else root


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """A (H, W, C) uint8 or uint16 image in another size, with antialiasing."""
    if image.shape[:2] == (height, width):
        return image
    tensor = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if image.dtype == np.uint16:
        tensor = tensor.float()
    tensor = interpolate(tensor, (height, width), mode="bilinear", antialias=True)
    return tensor[0].permute(1, 2, 0).round().numpy().astype(image.dtype)


def _run(
    write: Callable[[int], None],
    samples: list[int],
    what: str,
    remember: Callable[[list[int]], None],
    chunk: int = 1024,
) -> None:
    """Write all samples with all CPUs; what was written is remembered after every chunk."""
    with ThreadPoolExecutor(cpus_per_rank()) as pool, tqdm(total=len(samples), desc=what) as bar:
        for start in range(0, len(samples), chunk):
            part = samples[start : start + chunk]
            for _ in pool.map(write, part):
                bar.update()
            remember(part)


def _open(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """The array in the file, or a new one of zeros."""
    if path.exists():
        return cast(np.memmap, np.load(path, mmap_mode="r+"))
    return np.lib.format.open_memmap(path, "w+", dtype, shape)


def command_line(options: dict[str, str | None]) -> Config:
    """The configuration that the Hydra overrides among the arguments give; others go to `options`."""
    overrides = []
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key in options:
            options[key] = value
        else:
            overrides.append(argument)
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return cast(Config, compose("config", overrides))


def main() -> None:
    """Command line: Hydra overrides of the data, `out=DIR` and `format=pixels|jpeg`."""
    options = {"out": None, "format": "pixels"}
    cfg = command_line(options)
    if options["out"] is None:
        sys.exit(f"{__doc__}\nout=DIR is missing")
    try:
        pack(cfg.data, Path(options["out"]), str(options["format"]))
    except (ValueError, OSError) as error:
        sys.exit(f"loaders.pack: {error}")


if __name__ == "__main__":
    main()
