"""Masks: the class of each pixel."""

from dataclasses import dataclass

from loaders.targets.base import listed
from loaders.targets.image_target import ImageSpec, ImageTarget

NO_PIXEL = -100
"""The `ignore_index` that no mask holds: PyTorch's own default."""


@dataclass(frozen=True)
class Masks(ImageTarget):
    """The class of each pixel of the input; in a batch (B, H, W)."""

    kind = "masks"
    dtype = "int64"
    interpolation = "nearest"

    classes: tuple[str, ...]
    """Their names."""

    ignore_index: int = NO_PIXEL
    """Index of pixels without a class."""

    stored_dtype: str = "uint8"
    """`uint8` or `uint16`: type of the masks' pixels in files and packs."""

    def describe(self) -> str:
        return f"masks of {listed('classes', self.classes)}"

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return ImageSpec(1, self.stored_dtype, 1, self.interpolation, "indices")
