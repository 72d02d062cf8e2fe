"""A small transformer over bytes."""

import torch
from torch import Tensor, nn


class CharTransformer(nn.Module):
    def __init__(self, in_channels: int, num_outputs: int, width: int = 64) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(num_outputs, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        places = self.places(torch.arange(length, device=inputs.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        return self.head(self.layers(self.bytes(inputs) + places, mask))
