"""MNIST, whole or as the subset that lies in this repository; its images fit into memory."""

from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.decode import reason_of
from loaders.headers import one_process_if_possible
from loaders.index import Index
from loaders.layouts.files import refuse_to_fill
from loaders.targets import Labels

UNPACKED = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]
MNIST_MINI = Path(__file__).parents[2] / "data" / "mnist_mini.npz"


def mnist_mini(data: DataConfig) -> tuple[Index, Index]:
    with np.load(MNIST_MINI) as arrays:
        return (
            _digits("mnist_mini/train", arrays["train_images"], arrays["train_labels"]),
            _digits("mnist_mini/val", arrays["val_images"], arrays["val_labels"]),
        )


def mnist(data: DataConfig) -> tuple[Index, Index]:
    from torchvision.datasets import MNIST

    refuse_to_fill(Path(data.root), "MNIST")
    raw = Path(data.root, "MNIST", "raw")
    try:
        with one_process_if_possible(Path(data.root) / "download"):
            train, val = (MNIST(data.root, train=train, download=True) for train in (True, False))
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        reason = reason_of(error, str(raw))
        if all((raw / name).is_file() for name in UNPACKED):
            raise ValueError(
                f"MNIST in {raw} cannot be read ({reason}); remove what is damaged there, and it is "
                "unpacked or downloaded again"
            ) from error
        raise FileNotFoundError(
            f"MNIST is not in {data.root} and could not be downloaded ({reason}); put "
            f"{', '.join(f'{name}.gz' for name in UNPACKED)} into {raw}, or use data=mnist_mini, "
            "which needs no download"
        ) from error
    return (
        _digits("mnist/train", train.data.numpy(), train.targets.numpy()),
        _digits("mnist/val", val.data.numpy(), val.targets.numpy()),
    )


def _digits(name: str, images: np.ndarray, labels: np.ndarray) -> Index:
    return Index(
        name=name,
        sizes=np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1)),
        channels=1,
        target=Labels(labels.astype(np.int64), tuple("0123456789")),
        images=np.ascontiguousarray(images)[..., None],
    )
