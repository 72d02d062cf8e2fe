"""U-Net, after Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image
Segmentation", MICCAI 2015, with padding, BatchNorm and fewer channels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from models.small_cnn import conv_block


class UNet(nn.Module):
    """Levels of two 3x3 convolutions, each at half the resolution of the one above, and the way
    back up, where each level sees its features of the way down; then a linear layer at each pixel.

    Inputs: (N, in_channels, H, W) of any size. Outputs: (N, num_outputs, H, W). ``width``: channels
    at full resolution, doubled at each of the further ``num_levels``. With ``batch_norm=False`` no
    layer looks at the other images of a batch.
    """

    def __init__(
        self,
        in_channels: int,
        num_outputs: int,
        width: int = 32,
        num_levels: int = 4,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        if width < 1 or num_levels < 1:
            raise UserError(f"{width=}, {num_levels=}: use 1 or more for each number")
        self.multiple = 2 ** (num_levels - 1)
        channels = [width * 2**level for level in range(num_levels)]
        self.down = nn.ModuleList(
            two_convs(before, after, batch_norm)
            for before, after in zip([in_channels, *channels], channels, strict=False)
        )
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(2 * above, above, 2, stride=2) for above in channels[-2::-1]
        )
        self.up = nn.ModuleList(
            two_convs(2 * above, above, batch_norm) for above in channels[-2::-1]
        )
        self.head = nn.Conv2d(width, num_outputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        height, width = inputs.shape[-2:]
        # Each level halves the size, so pad to a multiple of this power of two.
        padding = (0, -width % self.multiple, 0, -height % self.multiple)
        x = F.pad(inputs, padding, mode="replicate")
        features = []
        for number, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if number else x)
            features.append(x)
        features.pop()
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            x = level(torch.cat([features.pop(), enlarge(x)], dim=1))
        return self.head(x)[..., :height, :width]


def two_convs(in_channels: int, out_channels: int, batch_norm: bool) -> nn.Sequential:
    return nn.Sequential(
        conv_block(in_channels, out_channels, batch_norm),
        conv_block(out_channels, out_channels, batch_norm),
    )
