"""The contract that every backend fulfils, and what all of them share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from loaders.plan import PlanSampler, output_size

if TYPE_CHECKING:
    from conf.schema import Config


class Loader:
    """Iterates over this rank's batches of one split.

    A batch is `(inputs, targets)` on `device`: float32 inputs of shape (B, C, H, W), int64 class
    labels of shape (B,). A backend only implements `batches()`.

    Attributes:
        device: where the batches lie.
        in_channels: C of the inputs.
        num_classes: number of classes.
    """

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        self.sampler, self.cfg, self.device = sampler, cfg, device
        index, data = sampler.index, cfg.data
        self.in_channels, self.num_classes = index.channels, index.num_classes
        self.output_size = output_size(data, index)
        self.position = 0
        low, high = data.value_range
        mean, std = np.array(data.mean or [0.0]), np.array(data.std or [1.0])
        for key, values in [("mean", mean), ("std", std)]:
            if len(values) not in (1, index.channels):
                raise ValueError(
                    f"data.{key} has {len(values)} values but the images of {index.name} have "
                    f"{index.channels} channels; give one value or {index.channels}"
                )
        self.scale = self._per_channel((high - low) / std)
        self.shift = self._per_channel((low - mean) / std)

    def _per_channel(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1)

    def batches(self) -> Iterator[tuple[np.ndarray, Tensor]]:
        """The sampler's rows, batch by batch, each with its images executed.

        Yields:
            rows: array of dtype `plan.ROW`, of length B.
            images: (B, H, W, C) uint8, cut, resized and flipped; on any device.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        """The epoch whose plan is followed."""
        return self.sampler.epoch

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that were already yielded."""
        return self.position // self.sampler.global_batch_size

    @property
    def epoch_is_finished(self) -> bool:
        return self.position >= self.sampler.num_rows

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's plan. The same epoch again keeps a position that was loaded."""
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: the epoch and how many of its rows all ranks together have used."""
        return {"epoch": self.sampler.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken, on any number of ranks."""
        self.sampler.set_epoch(state["epoch"])
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.epoch_is_finished:
            self.position = 0
        self.sampler.start_row = self.position
        for rows, images in self.batches():
            # Counted before the batch is handed out: a checkpoint written in the loop's body holds
            # a step that has already used it.
            self.position += self.sampler.global_batch_size
            yield self.finish(rows, images)
        self.position = self.sampler.num_rows

    def finish(self, rows: np.ndarray, images: Tensor) -> tuple[Tensor, Tensor]:
        """Turn a backend's batch into what the model sees, on the device."""
        inputs = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        if not self.cfg.loader.channels_last:
            inputs = inputs.contiguous()
        inputs = inputs.to(torch.float32).div_(255)
        inputs = self._jitter_colours(rows, inputs)
        inputs.mul_(self.scale).add_(self.shift)
        assert self.sampler.index.labels is not None
        labels = torch.from_numpy(self.sampler.index.labels[rows["sample"]])
        return inputs, labels.to(self.device, non_blocking=True)

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Inputs of shape (B, C, H, W) as pictures: 1 or 3 channels with values in [0, 1]."""
        pictures = ((inputs.float() - self.shift) / self.scale).clamp(0, 1)
        return pictures if self.in_channels in (1, 3) else pictures[:, :1]

    def _jitter_colours(self, rows: np.ndarray, images: Tensor) -> Tensor:
        """Brightness, contrast and saturation, in this order, as torchvision's `adjust_*` do it."""
        grey_weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)

        def factor(name: str) -> Tensor:
            return torch.from_numpy(rows[name].copy()).to(self.device).view(-1, 1, 1, 1)

        def grey() -> Tensor:
            if images.shape[1] != 3:
                return images.mean(dim=1, keepdim=True)
            return (images * grey_weights).sum(dim=1, keepdim=True)

        if (rows["brightness"] != 1).any():
            images = images.mul(factor("brightness")).clamp_(0, 1)
        if (rows["contrast"] != 1).any():
            mean = grey().mean(dim=(2, 3), keepdim=True)
            images = torch.lerp(mean, images, factor("contrast")).clamp_(0, 1)
        if (rows["saturation"] != 1).any():
            images = torch.lerp(grey(), images, factor("saturation")).clamp_(0, 1)
        return images
