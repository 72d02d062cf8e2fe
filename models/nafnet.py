"""NAFNet, after Chen et al., "Simple Baselines for Image Restoration", ECCV 2022."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError, counted


class NAFNet(nn.Module):
    """A U-net of NAFBlocks, without activation functions, that predicts a correction of its input.

    Inputs: (N, in_channels, H, W) of any size. Outputs: (N, in_channels, scale * H, scale * W);
    with scale > 1 the correction is added to the input enlarged by bicubic interpolation.
    ``width``: channels at full resolution, doubled at each level. ``num_blocks``: blocks of each
    level, from full resolution to the lowest; all but the lowest run as many again on the way up.
    """

    def __init__(
        self,
        in_channels: int,
        num_outputs: int,
        width: int = 16,
        num_blocks: Sequence[int] = (1, 1, 1),
        scale: int = 1,
    ) -> None:
        super().__init__()
        if num_outputs != in_channels:
            raise UserError(
                f"model=nafnet returns images of {counted(in_channels, 'channel')}, as its inputs; "
                f"the task needs {num_outputs}: use model=unet for masks, torchvision for labels"
            )
        if width < 1 or scale < 1 or min(num_blocks, default=0) < 1:
            raise UserError(f"{width=}, {num_blocks=}, {scale=}: use 1 or more for each number")
        self.scale = scale
        self.multiple = 2 ** (len(num_blocks) - 1)
        self.head = nn.Conv2d(in_channels, width, 3, padding=1)
        self.body = Level(width, tuple(num_blocks))
        self.tail = nn.Sequential(
            nn.Conv2d(width, in_channels * scale**2, 3, padding=1),
            nn.PixelShuffle(scale),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        height, width = inputs.shape[-2:]
        # Each level halves the size, so pad to a multiple of this power of two.
        padding = (0, -width % self.multiple, 0, -height % self.multiple)
        x = self.body(self.head(F.pad(inputs, padding, mode="replicate")))
        correction = self.tail(x)[..., : height * self.scale, : width * self.scale]
        if self.scale > 1:
            inputs = F.interpolate(inputs, scale_factor=self.scale, mode="bicubic")
        return inputs + correction


class Level(nn.Module):
    """The blocks of one resolution and, between them, the level of half that resolution, if any."""

    def __init__(self, channels: int, num_blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.lower: nn.Module | None = None
        self.encoder = nn.Sequential(*(NAFBlock(channels) for _ in range(num_blocks[0])))
        if len(num_blocks) > 1:
            self.lower = nn.Sequential(
                nn.Conv2d(channels, 2 * channels, 2, stride=2),
                Level(2 * channels, num_blocks[1:]),
                nn.Conv2d(2 * channels, 4 * channels, 1, bias=False),
                nn.PixelShuffle(2),
            )
            self.decoder = nn.Sequential(*(NAFBlock(channels) for _ in range(num_blocks[0])))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return x if self.lower is None else self.decoder(x + self.lower(x))


class NAFBlock(nn.Module):
    """Two residual branches: convolutions with channel attention, then a gated linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            LayerNorm2d(channels),
            nn.Conv2d(channels, 2 * channels, 1),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels),
            SimpleGate(),
            ChannelAttention(channels, channels, 1),
            nn.Conv2d(channels, channels, 1),
        )
        self.feed_forward = nn.Sequential(
            LayerNorm2d(channels),
            nn.Conv2d(channels, 2 * channels, 1),
            SimpleGate(),
            nn.Conv2d(channels, channels, 1),
        )
        # Zero: each block starts as the identity, which keeps deep stacks trainable.
        self.beta = nn.Parameter(torch.zeros(channels, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.beta * self.convolutions(x)
        return x + self.gamma * self.feed_forward(x)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of each position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SimpleGate(nn.Module):
    """One half of the channels times the other half: the only nonlinearity."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return first * second


class ChannelAttention(nn.Conv2d):
    """Each channel times a linear function (a 1x1 convolution) of all channels' image means."""

    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x.mean(dim=(2, 3), keepdim=True))
