"""Images and classes of a data set of Hugging Face: `data=huggingface data.root=NAME_OR_FOLDER`."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, float32
from torch.utils.data import Dataset
from torchvision.transforms import v2

from conf.errors import UserError, told
from conf.schema import DataConfig
from loaders.own_data import OwnData
from loaders.splits import check_no_split, split_by_seed
from loaders.targets import Target


class Images(Dataset):
    """Rows of a `datasets.Dataset`: its first column of images, and of class labels."""

    def __init__(self, rows: Any, image: str, label: str, transform: v2.Transform) -> None:
        self.rows, self.image, self.label, self.transform = rows, image, label, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row = self.rows[number]
        return self.transform(row[self.image].convert("RGB")), row[self.label]


def huggingface(data: DataConfig, split: str) -> OwnData | None:
    """Open a split of a folder that `save_to_disk` wrote, or of what `load_dataset` finds under
    this name; without a split `validation` or `test`, a part of `train` validates.
    """
    if split not in ("train", "val"):
        return None
    import datasets

    given = [f"data.{key}={getattr(data, key)}" for key in ("crop", "resize", "mean", "std")]
    if not (data.crop and data.resize and data.mean and data.std):
        raise UserError(f"{' '.join(given)}: data=huggingface needs all four")
    on_disk = Path(data.root, "dataset_dict.json").is_file()
    try:
        splits = (datasets.load_from_disk if on_disk else datasets.load_dataset)(data.root)
        train = splits["train"]
    except Exception as error:  # without a network, a name or a split, of any type
        raise UserError(
            f"data.root={data.root} cannot be read or downloaded ({told(error)}); use a name on "
            "the Hub, or a folder that save_to_disk of a DatasetDict with a split train wrote"
        ) from error
    val = next((splits[name] for name in ("validation", "test") if name in splits), None)
    kinds = {type(kind): name for name, kind in reversed(train.features.items())}
    if not {datasets.Image, datasets.ClassLabel} <= kinds.keys():
        raise UserError(
            f"data.root={data.root} has the columns {', '.join(train.features)}, not one of images "
            "and one of class labels; cast them with cast_column"
        )
    image, label = kinds[datasets.Image], kinds[datasets.ClassLabel]
    if val is None:
        labels = np.array(train[label]) if data.fold is not None else None
        train, val = (train.select(part) for part in split_by_seed(len(train), data, labels))
    else:
        check_no_split(data)
    size = data.crop if isinstance(data.crop, list) else [data.crop, data.crop]
    as_input = v2.ToImage(), v2.ToDtype(float32, scale=True), v2.Normalize(data.mean, data.std)
    augmented = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *as_input])
    centred = v2.Compose([v2.Resize(data.resize), v2.CenterCrop(size), *as_input])
    rows, transform = (train, augmented) if split == "train" else (val, centred)
    target = Target("labels", np.array(rows[label]), tuple(rows.features[label].names))
    return OwnData(Images(rows, image, label, transform), target)
