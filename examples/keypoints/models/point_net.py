"""Points in images, by heatmaps."""

import torch
from torch import Tensor, nn


class PointNet(nn.Module):
    """The mean place in a heatmap for each point, in pixels of the crop."""

    def __init__(self, in_channels: int, num_outputs: int, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, width, 7, padding=3)
        self.last = nn.Conv2d(width, num_outputs, 7, padding=3)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        heat = self.last(self.first(inputs["image"]).relu()).float()
        share = heat.flatten(2).softmax(dim=2).view_as(heat)
        place = torch.arange(heat.shape[-1], device=heat.device)
        means = [(share.sum(dim=dim) * place).sum(dim=2) for dim in (2, 3)]
        return {"points": torch.stack(means, dim=2), "frame": inputs["frame"]}
