"""Turns a backend's uint8 or uint16 images into the model's float32 batch, on the device."""

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError, counted
from conf.schema import Config
from loaders.augment import Augmentation, to_device
from loaders.batch import Batch
from loaders.index import Index
from loaders.limits import cpus_per_rank, map_in_threads
from loaders.loader import DataInfo
from loaders.plan import Plan
from loaders.rectangles import Rectangles


class ImageTransform:
    """Flips images and converts them to float32 NCHW, enlarged, normalised and augmented as their
    rows say.

    Raises:
        UserError: `data.mean` or `data.std` does not fit the number of channels.
    """

    def __init__(self, rectangles: Rectangles, cfg: Config, device: torch.device) -> None:
        self.rectangles, self.index = rectangles, rectangles.index
        self.augmentations = rectangles.augmentations
        # Those that change images in [0, 1].
        self.on_images = [a for a in self.augmentations if type(a).apply != Augmentation.apply]
        self.output_size, self.device = rectangles.output_size, device
        self.memory = BatchMemory()
        last = cfg.loader.channels_last
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        low, high = cfg.data.value_range
        mean, std = np.array(cfg.data.mean or [0.0]), np.array(cfg.data.std or [1.0])
        channels = self.index.inputs.channels
        for key, values in [("mean", mean), ("std", std)]:
            if len(values) not in (1, channels):
                raise UserError(
                    f"data.{key} has {counted(len(values), 'value')} but the images of "
                    f"{self.index.name} have {counted(channels, 'channel')}; give one value or "
                    f"{channels}"
                )
        # From [0, 1] to what the model sees: of inputs, and of targets, which have no mean and std.
        self.scales = [self._per_channel((high - low) / std), self._per_channel([high - low])]
        self.shifts = [self._per_channel((low - mean) / std), self._per_channel([low])]

    def _per_channel(self, values: "np.ndarray | list[float]") -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1)

    @torch.inference_mode(False)  # tensors made in inference mode cannot be used in training
    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets that the model sees."""
        rows, target = batch.rows, self.index.target
        inputs, *rest = (self._side(n, side, rows) for n, side in enumerate(batch.content))
        if rest:
            targets = rest[0]
        elif target.values is not None:
            targets = to_device(target.values[rows["sample"]], self.device)
        else:
            targets = to_device(rows["sample"].copy(), self.device)
        for augmentation in self.augmentations:
            inputs, targets = augmentation.apply_to_both(inputs, targets, rows, target)
        return inputs, targets

    def _side(self, side: int, images: Tensor, rows: np.ndarray) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        if self.device.type == "cpu" and (rows["hflip"] | rows["vflip"]).any():
            images = images.clone()  # a worker may put another batch where they were
        flip(images, rows)
        spec = self.index.sides[side]
        if spec.interpolation == "nearest":
            return images[..., 0].long()
        scale, shift = self.scales[side], self.shifts[side]
        full_intensity = 65535 if images.dtype == torch.uint16 else 255
        channels_first = images.permute(0, 3, 1, 2)
        batch = self._empty(*channels_first.shape).copy_(channels_first)
        if not self.on_images:  # before enlarging, while there are fewer pixels
            batch.mul_(scale / full_intensity).add_(shift)
        height, width = (spec.size_factor * length for length in self.output_size)
        if batch.shape[2:] != (height, width):
            enlarged = self._empty(len(batch), batch.shape[1], height, width)
            # interpolate(mode="bilinear"), which has no `out`
            batch = torch.ops.aten.upsample_bilinear2d.out(
                batch, (height, width), False, out=enlarged
            )
        if self.on_images:
            batch.div_(full_intensity)
            for augmentation in self.on_images:
                batch = augmentation.apply(batch, rows)
            batch.mul_(scale).add_(shift)
        return batch.contiguous(memory_format=self.memory_format)

    def _empty(self, count: int, channels: int, height: int, width: int) -> Tensor:
        """Return an uninitialised float32 tensor of this shape in the memory format."""
        if self.device.type != "cpu":
            shape = count, channels, height, width
            return torch.empty(shape, device=self.device, memory_format=self.memory_format)
        if self.memory_format == torch.channels_last:
            return self.memory.empty(count, height, width, channels).permute(0, 3, 1, 2)
        return self.memory.empty(count, channels, height, width)

    def info(self, plan: Plan) -> DataInfo:
        """Return facts about the samples of a plan."""
        index, inputs = self.index, self.index.inputs
        return DataInfo(
            description=self.rectangles.describe(),
            target=index.target,
            in_channels=inputs.channels,
            dtype=inputs.dtype,
            num_samples=len(index),
            num_dropped=len(index) - plan.num_rows,
            example=torch.zeros(1, inputs.channels, *self.output_size),
            name_of=index.name_of,
            left_out=index.left_out,
            has_files=index.form != "pixels",
            pictures=self.denormalize,
            class_counts=lambda: class_counts(index),
        )

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Convert inputs (B, C, H, W) to pictures: 1 or 3 channels with values in [0, 1]."""
        pictures = ((inputs.float() - self.shifts[0]) / self.scales[0]).clamp(0, 1)
        return pictures if self.index.inputs.channels in (1, 3) else pictures[:, :1]


def flip(images: Tensor, rows: np.ndarray) -> None:
    """Flip images (B, H, W, C), in place, as their rows say."""
    # torch can index and flip int16, but not uint16.
    pixels = images.view(torch.int16) if images.dtype == torch.uint16 else images
    for name, dim in (("vflip", 1), ("hflip", 2)):
        numbers = np.flatnonzero(rows[name])
        if images.device.type == "cpu":
            for number in numbers:  # one by one: new memory for all would take as long again
                pixels[number] = pixels[number].flip(dim - 1)
        elif len(numbers):
            flipped = to_device(numbers, images.device)
            pixels[flipped] = pixels[flipped].flip(dim)


class BatchMemory:
    """Float32 memory that batches which are not in use any more leave to later ones.

    New memory costs a page fault for each page: without this, 5-channel TIFFs enlarged to 220x220
    take 1.3 times the CPU's time, and JPEGs 1.05 times.
    """

    def __init__(self) -> None:
        self.unused: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=8))

    def empty(self, *shape: int) -> Tensor:
        pieces = self.unused[math.prod(shape)]
        try:
            piece = pieces.pop()
        except IndexError:
            piece = np.empty(shape, np.float32)  # unlike torch, NumPy asks Linux for huge pages
        lent = piece.reshape(shape)  # a view, which lives as long as the tensor and its views
        weakref.finalize(lent, pieces.append, piece).atexit = False
        return torch.from_numpy(lent)


def class_counts(index: Index) -> np.ndarray | None:
    """See `DataInfo.class_counts`; of masks, pixels are counted."""
    target = index.target
    if target.kind != "masks":
        return target.class_counts()

    def count(sample: int) -> np.ndarray:
        indices = index.read(sample, 1).ravel()
        counted = indices[indices != target.ignore_index]
        return np.bincount(counted, minlength=len(target.classes))

    counts = map_in_threads(count, range(len(index)), "counting classes", cpus_per_rank())
    return np.sum(counts, axis=0, dtype=float)
