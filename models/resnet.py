"""ResNet of He et al. 2016, "Deep Residual Learning for Image Recognition", from torchvision."""

from torch import nn


def resnet18(in_channels: int, num_outputs: int, zero_init_residual: bool = False) -> nn.Module:
    """ResNet-18 with fresh weights; see `build_resnet`."""
    return build_resnet("resnet18", in_channels, num_outputs, zero_init_residual)


def resnet50(in_channels: int, num_outputs: int, zero_init_residual: bool = False) -> nn.Module:
    """ResNet-50 with fresh weights; see `build_resnet`."""
    return build_resnet("resnet50", in_channels, num_outputs, zero_init_residual)


def build_resnet(
    name: str,
    in_channels: int,
    num_outputs: int,
    zero_init_residual: bool,
) -> nn.Module:
    """torchvision's ResNet `name`, its first convolution replaced when `in_channels` is not 3.

    Inputs: (N, in_channels, H, W); the last features are 32 times smaller. Outputs:
    (N, num_outputs). ``zero_init_residual`` starts every residual branch at zero (Goyal et
    al. 2017, section 5.1), which helps large batches.
    """
    import torchvision.models  # here: importing it takes seconds, and other models do not need it

    model = torchvision.models.get_model(
        name,
        num_classes=num_outputs,
        zero_init_residual=zero_init_residual,
    )
    if in_channels != 3:
        conv = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        model.conv1 = conv
    return model
