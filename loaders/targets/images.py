"""Target images: the second side of a pair."""

from dataclasses import dataclass

from loaders.targets.image_target import ImageSpec, ImageTarget


@dataclass(frozen=True)
class TargetImages(ImageTarget):
    """Images of the inputs' dtype: the second side of a pair; in a batch (B, C, f * H, f * W)."""

    kind = "images"
    interpolation = "linear"

    size_factor: int = 1
    """f: their height and width, divided by those of the inputs."""

    num_channels: int = 3
    """C."""

    @property
    def channels(self) -> int:
        return self.num_channels

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return inputs._replace(channels=self.channels, size_factor=self.size_factor)
