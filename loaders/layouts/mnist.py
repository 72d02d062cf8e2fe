"""All of MNIST, in memory."""

from pathlib import Path

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import Index, check_no_split, one_process_at_a_time
from loaders.layouts.mnist_mini import digits

UNPACKED = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def mnist(data: DataConfig) -> tuple[Index, Index]:
    from torchvision.datasets import MNIST

    check_no_split(data, "data=mnist")
    raw = Path(data.root, "MNIST", "raw")
    try:
        if not all((raw / name).is_file() for name in UNPACKED):
            with one_process_at_a_time(Path(data.root) / "download"):
                MNIST(data.root, download=True)
        train, val = (MNIST(data.root, train=train) for train in (True, False))
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        raise UserError(
            f"MNIST in {raw} cannot be read or downloaded ({reason_of(error, str(raw))}); remove "
            f"what is damaged, put {', '.join(UNPACKED)} there, unpacked, or use data=mnist_mini, "
            "which needs no download"
        ) from error
    return (
        digits("mnist/train", train.data.numpy(), train.targets.numpy()),
        digits("mnist/val", val.data.numpy(), val.targets.numpy()),
    )
