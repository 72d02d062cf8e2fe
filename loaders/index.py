"""What samples there are: found and checked once, before any backend runs."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock
from PIL import Image

if TYPE_CHECKING:
    from conf.schema import DataConfig


@dataclass(frozen=True)
class Index:
    """The samples of one split.

    Either `images` holds them all in memory, or `files` names them.
    """

    name: str
    """Data set and split, for messages, such as `mnist_mini/train`."""

    sizes: np.ndarray
    """(N, 2) int: height and width of each image in pixels."""

    channels: int
    """Channels of each image."""

    labels: np.ndarray | None = None
    """(N,) int64: class of each sample, in [0, num_classes)."""

    num_classes: int | None = None
    """Number of classes; None where the targets are images."""

    images: np.ndarray | None = None
    """(N, height, width, channels) uint8."""

    files: list[str] | None = None
    """Path of each sample's image."""

    def __len__(self) -> int:
        return len(self.sizes)


def build_index(data: "DataConfig") -> tuple[Index, Index]:
    """Index of the training and of the validation split.

    Raises:
        ValueError: `data.layout` is unknown.
        FileNotFoundError: the data is not there; the message says how to get it.
    """
    if data.layout not in LAYOUTS:
        raise ValueError(f"data.layout={data.layout} is unknown; use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[data.layout](data)


def _digits(name: str, images: np.ndarray, labels: np.ndarray) -> Index:
    return Index(
        name=name,
        sizes=np.tile(np.array(images.shape[1:3]), (len(images), 1)),
        channels=1,
        labels=labels.astype(np.int64),
        num_classes=10,
        images=np.ascontiguousarray(images)[..., None],
    )


def _mnist_mini(data: "DataConfig") -> tuple[Index, Index]:
    path = Path(__file__).parents[1] / "data" / "mnist_mini.npz"
    with np.load(path) as arrays:
        return (
            _digits("mnist_mini/train", arrays["train_images"], arrays["train_labels"]),
            _digits("mnist_mini/val", arrays["val_images"], arrays["val_labels"]),
        )


def _mnist(data: "DataConfig") -> tuple[Index, Index]:
    from torchvision.datasets import MNIST

    try:
        with one_process_at_a_time(Path(data.root) / "download"):
            train, val = (MNIST(data.root, train=train, download=True) for train in (True, False))
    except (RuntimeError, OSError) as error:
        raise FileNotFoundError(
            f"MNIST is not in {data.root} and could not be downloaded ({error}); put "
            "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
            f"t10k-labels-idx1-ubyte.gz into {Path(data.root, 'MNIST', 'raw')}, or use "
            "data=mnist_mini, which needs no download"
        ) from error
    return (
        _digits("mnist/train", train.data.numpy(), train.targets.numpy()),
        _digits("mnist/val", val.data.numpy(), val.targets.numpy()),
    )


LAYOUTS: dict[str, Callable[["DataConfig"], tuple[Index, Index]]] = {
    "mnist_mini": _mnist_mini,
    "mnist": _mnist,
}


def one_process_at_a_time(path: Path) -> FileLock:
    """Lock among the processes of this machine; the empty file `path`.lock stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


def as_image_tree(index: Index, cache_dir: str) -> Index:
    """The same samples as PNG files, for backends that read files; written once, then reused.

    The tree is `cache_dir/<name>-<hash of the content>/<class>/<sample>.png`. Of several processes
    that ask at once, one writes and the others wait; a tree that was not finished is never used.
    """
    if index.images is None or index.labels is None:
        return index
    content = hashlib.sha256(index.images.tobytes() + index.labels.tobytes()).hexdigest()[:12]
    tree = Path(cache_dir, f"{index.name.replace('/', '-')}-{content}").absolute()
    names = [f"{label}/{sample:05d}.png" for sample, label in enumerate(index.labels)]
    with one_process_at_a_time(tree):
        if not tree.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{tree.name}.", dir=tree.parent))
            try:
                for label in np.unique(index.labels):
                    (unfinished / str(label)).mkdir()
                for image, name in zip(index.images, names, strict=True):
                    Image.fromarray(image.squeeze(-1)).save(unfinished / name)
                unfinished.rename(tree)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return replace(index, images=None, files=[str(tree / name) for name in names])
