"""AlexNet in the form of Krizhevsky 2014, "One weird trick for parallelizing convolutional neural
networks", from torchvision: so light that the loader is what limits a run.
"""

from torch import nn


def alexnet(in_channels: int, num_outputs: int, dropout: float = 0.5) -> nn.Module:
    """torchvision's AlexNet with fresh weights, its first convolution replaced when `in_channels`
    is not 3.

    Inputs: (N, in_channels, H, W), H and W at least 63. Outputs: (N, num_outputs).
    ``dropout`` is the probability that a hidden unit of the classifier is dropped in training.
    """
    import torchvision.models  # here: importing it takes seconds, and other models do not need it

    model = torchvision.models.AlexNet(num_classes=num_outputs, dropout=dropout)
    if in_channels != 3:
        model.features[0] = nn.Conv2d(in_channels, 64, kernel_size=11, stride=4, padding=2)
    return model
