"""What kinds of targets that are images have in common, and the description of an image."""

from dataclasses import dataclass
from typing import NamedTuple

from loaders.targets.base import Target


class ImageSpec(NamedTuple):
    """One of the images of a sample: the input, or its target."""

    channels: int
    dtype: str
    """`uint8` or `uint16`."""
    size_factor: int = 1
    """Height and width, divided by those of the input."""
    interpolation: str = "linear"
    """`linear` or `nearest`."""
    content: str = "rgb"
    """Conversion of the files' pixels: to `rgb` (8 bits), `stored` (none), `indices` (classes)."""

    @property
    def per_pixel(self) -> int:
        """Values of this side for each pixel of the input."""
        return self.channels * self.size_factor**2


# part: pairs|restoration|masks|segmentation
@dataclass(frozen=True)
class ImageTarget(Target):
    """The base class of targets that are images."""

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        """Return the specification of the target images of such inputs."""
        raise NotImplementedError
