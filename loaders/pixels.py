"""From a backend's uint8 or uint16 images to what the model sees, on the device."""

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.augment import AUGMENTATIONS, ON_IMAGES
from loaders.augmentation import parts
from loaders.index import Index
from loaders.memory import BatchMemory
from loaders.targets import Labels, NoTarget, Numbers, SeveralLabels

RawBatch = tuple[np.ndarray, tuple[Tensor, ...]]
"""Rows of dtype `plan.ROW`, and the images of each side: (B, H, W, C) of the index's dtype, cut to the
rows' rectangles, resized to `Loader.read_sizes()`, and flipped; on any device."""


class Pixels:
    """Finishes batches: float32 NCHW, enlarged, normalised, and augmented as their rows want it.

    Raises:
        ValueError: `data.mean` or `data.std` does not fit the number of channels.
    """

    def __init__(
        self, index: Index, output_size: tuple[int, int], cfg: Config, device: torch.device
    ) -> None:
        self.index, self.output_size, self.device = index, output_size, device
        last = cfg.loader.channels_last
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        # One batch is used while the next ones are ready or made; of pairs, each is two.
        self.memory = BatchMemory(most_kept=2 * (2 + cfg.loader.prefetch_factor))
        low, high = cfg.data.value_range
        mean, std = np.array(cfg.data.mean or [0.0]), np.array(cfg.data.std or [1.0])
        for key, values in [("mean", mean), ("std", std)]:
            if len(values) not in (1, index.channels):
                raise ValueError(
                    f"data.{key} has {len(values)} values but the images of {index.name} have "
                    f"{index.channels} channels; give one value or {index.channels}"
                )
        # From full intensity 1 to what the model sees, for each side: targets have no mean and std.
        self.scales = [self._per_channel((high - low) / std), self._per_channel([high - low])]
        self.shifts = [self._per_channel((low - mean) / std), self._per_channel([low])]

    def _per_channel(self, values: "np.ndarray | list[float]") -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1)

    @torch.inference_mode(False)  # whose tensors could not be used again in training
    def finish(
        self, rows: np.ndarray, images: tuple[Tensor, ...]
    ) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """The rows, and the inputs and targets that the model sees."""
        finished = [self._side(number, side, rows) for number, side in enumerate(images)]
        if isinstance(self.index.target, Labels | SeveralLabels | Numbers):
            values = torch.from_numpy(self.index.target.values[rows["sample"]])
            finished.append(self._sent(values))
        if isinstance(self.index.target, NoTarget):
            finished.append(self._sent(torch.from_numpy(rows["sample"].copy())))
        inputs, targets = finished
        for augmentation in AUGMENTATIONS:
            if not augmentation.is_neutral(rows):
                both = inputs, targets, rows, self.index.target
                inputs, targets = augmentation.apply_to_both(*both)
        return rows, (inputs, targets)

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Inputs of shape (B, C, H, W) as pictures: 1 or 3 channels with values in [0, 1]."""
        pictures = ((inputs.float() - self.shifts[0]) / self.scales[0]).clamp(0, 1)
        return pictures if self.index.channels in (1, 3) else pictures[:, :1]

    def _side(self, side: int, images: Tensor, rows: np.ndarray) -> Tensor:
        if self.index.sides[side].interpolation == "nearest":
            return images[..., 0].to(self.device, non_blocking=True).long()
        factor = self.index.size_factors[side]
        height, width = (factor * length for length in self.output_size)
        scale, shift = self.scales[side], self.shifts[side]
        full_intensity = 65535 if images.dtype == torch.uint16 else 255
        channels_first = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        batch = self._empty(channels_first.shape)
        augmentations = [a for a in ON_IMAGES if not a.is_neutral(rows)]
        for part in parts(batch):
            pictures = batch[part].copy_(channels_first[part])
            if not augmentations:  # while there are fewer pixels
                _scale_and_shift(pictures, scale / full_intensity, shift, out=pictures)
        if batch.shape[2:] != (height, width):
            enlarged = self._empty((*batch.shape[:2], height, width))
            # interpolate(mode="bilinear") into memory that is there already
            batch = torch.ops.aten.upsample_bilinear2d.out(
                batch, (height, width), False, out=enlarged
            )
        if augmentations:
            for part in parts(batch):
                pictures = batch[part].div_(full_intensity)
                for augmentation in augmentations:
                    pictures = augmentation.apply(pictures, rows[part])
                _scale_and_shift(pictures, scale, shift, out=batch[part])
        return batch

    def _sent(self, values: Tensor) -> Tensor:
        """Values of the host on the device; from pinned memory, so that the host does not wait."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "cpu":
            return self.memory.empty(shape, self.memory_format)
        return torch.empty(shape, device=self.device, memory_format=self.memory_format)


def _scale_and_shift(batch: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """batch * scale + shift, with scale and shift of shape (1, C or 1, 1, 1); `out` may be the batch."""
    # The factors of a whole line at once: a loop over fewer values is several times slower.
    line = (1, batch.shape[1], 1, batch.shape[3])
    is_channels_last = batch.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
    scale, shift = (
        factor.expand(line).contiguous(memory_format=memory_format) for factor in (scale, shift)
    )
    torch.addcmul(shift, batch, scale, out=out)
