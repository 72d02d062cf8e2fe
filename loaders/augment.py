"""What training does to samples at random: one object per augmentation, all of them in `AUGMENTATIONS`.

An augmentation names the columns that it adds to a row of the plan with their neutral values, which
leave the image as it is, and draws them. A rectangle and flips are executed by every backend; what
acts on finished batches does so in `apply`, on the device and once for all backends.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from conf.schema import DataConfig

Streams = Callable[[str], np.random.Generator]
"""The random numbers of a column, by its name: each has a stream of its own, so that switching one
augmentation on leaves the columns of the others alone."""


class Augmentation:
    """The base class: adds nothing, draws nothing, does nothing.

    Attributes:
        keys: of `data` that it follows; a checkpoint notes their values.
        columns: those it adds to a row: name, dtype and neutral value.
    """

    keys: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, float], ...] = ()

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, streams: Streams) -> None:
        """Fill in its columns.

        Args:
            rows: of training, of dtype `plan.ROW`, neutral so far.
            sizes: (len(rows), 2) height and width of the rows' images in pixels.
            data: the configuration.
            streams: where the random numbers come from.
        """

    def apply(self, images: Tensor, rows: np.ndarray, columns: Mapping[str, Tensor]) -> Tensor:
        """Finished images as their rows want them.

        Args:
            images: (B, C, H, W) float32 in [0, 1] on the device; may be changed in place.
            rows: of the plan, on the host.
            columns: of each augmentation that acts on batches, by name: (B, 1, 1, 1) float32 on the
                device. Whatever else travels there would make the host wait in each step.
        """
        return images

    def is_neutral(self, rows: np.ndarray) -> bool:
        """Whether these rows leave the images as they are."""
        return all(bool((rows[name] == neutral).all()) for name, _, neutral in self.columns)


class RandomCrop(Augmentation):
    """A rectangle of the crop's size anywhere in the image."""

    keys = ("random_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, streams: Streams) -> None:
        if data.random_crop:
            _place(rows, sizes, streams)


class RandomResizedCrop(Augmentation):
    """A rectangle anywhere with a random share of the area and a random aspect ratio (Szegedy et al.
    2015, "Going deeper with convolutions", section 6): ten tries, then the largest square."""

    keys = ("random_resized_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, streams: Streams) -> None:
        if data.random_resized_crop is None:
            return
        random, (low, high) = streams("height, width"), data.random_resized_crop
        area = sizes.prod(axis=1)[:, None] * random.uniform(low, high, (len(rows), 10))
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), area.shape))
        shapes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(int)
        fits = ((shapes > 0) & (shapes <= sizes[:, None])).all(axis=2)
        first = shapes[np.arange(len(rows)), fits.argmax(axis=1)]
        square = sizes.min(axis=1, keepdims=True)
        chosen = np.where(fits.any(axis=1, keepdims=True), first, square)
        rows["height"], rows["width"] = chosen.T
        _place(rows, sizes, streams)


def _place(rows: np.ndarray, sizes: np.ndarray, streams: Streams) -> None:
    """Move the rows' rectangles to where chance wants them, every position being as likely."""
    for start, length, whole in [("y", "height", sizes[:, 0]), ("x", "width", sizes[:, 1])]:
        rows[start] = streams(start).random(len(rows)) * (whole - rows[length] + 1)


class Flips(Augmentation):
    """Left and right, or upper and lower side exchanged."""

    keys = ("hflip", "vflip")
    columns = (("hflip", "?", False), ("vflip", "?", False))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, streams: Streams) -> None:
        rows["hflip"] = streams("hflip").random(len(rows)) < data.hflip
        rows["vflip"] = streams("vflip").random(len(rows)) < data.vflip


class ColourJitter(Augmentation):
    """Brightness, contrast and saturation, in this order, as torchvision's `adjust_*` do it."""

    keys = ("colour_jitter",)
    columns = (("brightness", "f4", 1.0), ("contrast", "f4", 1.0), ("saturation", "f4", 1.0))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, streams: Streams) -> None:
        for (name, *_), strength in zip(self.columns, data.colour_jitter, strict=True):
            rows[name] = 1 + strength * streams(name).uniform(-1, 1, len(rows))

    def apply(self, images: Tensor, rows: np.ndarray, columns: Mapping[str, Tensor]) -> Tensor:
        if (rows["brightness"] != 1).any():
            images = images.mul(columns["brightness"]).clamp_(0, 1)
        if (rows["contrast"] != 1).any():
            mean = _grey(images).mean(dim=(2, 3), keepdim=True)
            images = torch.lerp(mean, images, columns["contrast"]).clamp_(0, 1)
        if (rows["saturation"] != 1).any():
            images = torch.lerp(_grey(images), images, columns["saturation"]).clamp_(0, 1)
        return images


def _grey(images: Tensor) -> Tensor:
    """(B, 1, H, W): luma as ITU-R BT.601 weighs it; where there are not three channels, their mean."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


AUGMENTATIONS: tuple[Augmentation, ...] = (
    RandomCrop(),
    RandomResizedCrop(),
    Flips(),
    ColourJitter(),
)
ON_BATCHES = tuple(a for a in AUGMENTATIONS if type(a).apply is not Augmentation.apply)
