"""A small CNN for small images, quick to train on a CPU."""

from torch import Tensor, nn

from conf.errors import UserError


class SmallCNN(nn.Module):
    """Four 3x3 convolutions with width / 2, width, 2 width and 2 width channels, and max pooling
    between them; then the mean over all positions and a linear layer.

    Inputs: (N, in_channels, H, W), H and W at least 8. Outputs: (N, num_outputs). With
    ``batch_norm=False`` no layer looks at the other images of a batch, so the gradient of a batch
    is the mean of the gradients of its parts.
    """

    def __init__(
        self, in_channels: int, num_outputs: int, width: int = 32, batch_norm: bool = True
    ) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise UserError(f"width={width} is not a positive even number; use 32, for example")

        self.features = nn.Sequential(
            conv_block(in_channels, width // 2, batch_norm),
            nn.MaxPool2d(2),
            conv_block(width // 2, width, batch_norm),
            nn.MaxPool2d(2),
            conv_block(width, 2 * width, batch_norm),
            nn.MaxPool2d(2),
            conv_block(2 * width, 2 * width, batch_norm),
        )
        self.classifier = nn.Linear(2 * width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.features(inputs).mean(dim=(2, 3)))


def conv_block(in_channels: int, out_channels: int, batch_norm: bool) -> nn.Sequential:
    """Build a 3x3 convolution, BatchNorm where asked for, and ReLU; height and width stay."""
    # BatchNorm subtracts the mean, and with it any bias added before.
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=not batch_norm)
    if batch_norm:
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))
    # Without BatchNorm, the initial weights alone keep the signal from shrinking layer by layer.
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, nn.ReLU(inplace=True))
