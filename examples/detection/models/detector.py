"""torchvision's RetinaNet on a small backbone."""

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet, RetinaNetHead


class Detector(RetinaNet):
    def __init__(self, in_channels: int, num_outputs: int, width: int = 32) -> None:
        layers = []
        for channels in (in_channels, width, width):
            layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.InstanceNorm2d(width), nn.ReLU()]
        backbone = nn.Sequential(*layers)
        backbone.out_channels = width  # type: ignore[assignment]
        anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((0.5, 1.0, 2.0),))
        head = RetinaNetHead(width, 3, num_outputs, norm_layer=nn.InstanceNorm2d)
        super().__init__(backbone, num_outputs, anchor_generator=anchors, head=head)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features, sizes = [self.backbone(images)], [tuple(images.shape[2:])] * len(images)
        anchors = self.anchor_generator(ImageList(images, sizes), features)
        return self.head(features) | {"anchors": torch.stack(anchors)}
