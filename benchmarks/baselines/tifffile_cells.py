"""Multi-channel TIFFs as the multi-channel benchmark loads them: tifffile + DataLoader."""

from collections.abc import Iterable, Sequence

import tifffile
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from benchmarks.baselines import Recipe
from benchmarks.baselines.pil_imagefolder import data_loader, geometry


class Cells(Dataset[Tensor]):
    """One float32 tensor (C, H, W) per file, resized and cropped after the conversion."""

    def __init__(self, files: Sequence[str], recipe: Recipe) -> None:
        self.files = list(files)
        self.transform = transforms.Compose(
            [*geometry(recipe), transforms.Normalize(recipe.mean, recipe.std)]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Tensor:
        pixels = tifffile.imread(self.files[number])
        image = torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32)
        return self.transform(image / torch.iinfo(torch.from_numpy(pixels).dtype).max)


def batches(
    files: Sequence[str], recipe: Recipe, batch_size: int, num_workers: int = 0, seed: int = 0
) -> Iterable[Tensor]:
    """Interleaved TIFFs of any number of channels; only reading if the recipe has no resize."""
    return data_loader(Cells(files, recipe), recipe, batch_size, num_workers, seed)
