"""The contract that every backend fulfils, and what all of them share."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from loaders.index import Index, build_index
from loaders.plan import ROW, PlanSampler, output_size

if TYPE_CHECKING:
    from conf.schema import Config

RawBatch = tuple[np.ndarray, tuple[Tensor, ...]]
"""Rows of dtype `plan.ROW`, and their images, for pairs also their targets: each (B, H, W, C) of the
index's dtype, cut to the rows' rectangles, resized to `Loader.read_size` (targets: times the index's
scale) and flipped; on any device."""


class Loader:
    """Iterates over this rank's batches of one split.

    A batch is `(inputs, targets)` on `device`: float32 inputs of shape (B, C, H, W); int64 class labels
    of shape (B,), or float32 target images of shape (B, C, scale * H, scale * W). A backend only
    implements `batches()`.

    Attributes:
        device: where the batches lie.
        in_channels: C of the inputs.
        batch_size: B, on this device.
        last_rows: the rows of the batch that was yielded last.
        num_classes: number of classes; None if the targets are images.
        output_size: (H, W) of the inputs.
        read_size: (height, width) of the images that the backend delivers. This is `output_size`, but
            where every row enlarges a rectangle of the same size, that size: the enlarging is then
            done for the whole batch on the device, and fewer bytes travel.
        finishes_ahead: whether, on the CPU, a thread finishes the next batch while one is used; images
            that lie in memory are quicker finished at hand.
    """

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        self.sampler, self.cfg, self.device = sampler, cfg, device
        self.index, data = sampler.index, cfg.data
        self.in_channels, self.num_classes = self.index.channels, self.index.num_classes
        self.output_size = output_size(data, self.index)
        self.read_size = self._read_size()
        self.finishes_ahead = self.index.images is None
        self.batch_size = sampler.global_batch_size // sampler.num_replicas
        self.position = 0
        self.last_rows = np.zeros(0, ROW)
        self.kept_batches: list[tuple[Tensor, int]] = []
        self.choosing_batch = Lock()  # several threads may finish batches
        low, high = data.value_range
        mean, std = np.array(data.mean or [0.0]), np.array(data.std or [1.0])
        for key, values in [("mean", mean), ("std", std)]:
            if len(values) not in (1, self.in_channels):
                raise ValueError(
                    f"data.{key} has {len(values)} values but the images of {self.index.name} have "
                    f"{self.in_channels} channels; give one value or {self.in_channels}"
                )
        # From full intensity 1 to what the model sees; targets are not normalised by mean and std.
        self.scale = self._per_channel((high - low) / std)
        self.shift = self._per_channel((low - mean) / std)
        self.target_scale = self._per_channel(np.array([high - low]))
        self.target_shift = self._per_channel(np.array([low]))

    @staticmethod
    def find(cfg: "Config") -> tuple[Index, Index]:
        """Index of the training and of the validation split."""
        return build_index(cfg.data)

    def _per_channel(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1)

    def _read_size(self) -> tuple[int, int]:
        plan = self.sampler.plan()
        height, width = int(plan["height"][0]), int(plan["width"][0])
        random = self.sampler.shuffle and self.cfg.data.random_resized_crop is not None
        alike = (plan["height"] == height).all() and (plan["width"] == width).all()
        enlarged = height <= self.output_size[0] and width <= self.output_size[1]
        return (height, width) if alike and enlarged and not random else self.output_size

    def batches(self) -> Iterator[RawBatch]:
        """The sampler's rows, batch by batch, with their images."""
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
        """Where the run stands: the epoch, how many of its rows all ranks together have used, and what
        the plan of these rows depends on."""
        return {
            "epoch": self.sampler.epoch,
            "position": self.position,
            "plan": self.sampler.description(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken, on any number of ranks."""
        self.sampler.set_epoch(state["epoch"])
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.epoch_is_finished:
            self.position = 0
        self.sampler.start_row = self.position
        if self.device.type == "cuda":
            finished = self._finish_on_stream()
        elif self.finishes_ahead:
            finished = self._finish_in_thread()
        else:
            finished = self._finish_each()
        with limits_explained():
            for self.last_rows, batch in finished:
                # Counted before the batch is handed out: a checkpoint written in the loop's body
                # holds a step that has already used it.
                self.position += self.sampler.global_batch_size
                yield batch
        self.position = self.sampler.num_rows

    def _finish_each(self) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor]]]:
        for rows, images in self.batches():
            yield rows, self.finish(rows, images)

    def _finish_in_thread(self) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor]]]:
        """Finish the next batch in a thread of its own while the current one is used."""
        # Enlarging is work enough for all cores; they have other work while the rest is done.
        num_threads = 1 if self.read_size == self.output_size else torch.get_num_threads()
        with ThreadPoolExecutor(1, "finish", torch.set_num_threads, (num_threads,)) as pool:
            ready: tuple[np.ndarray, Future[tuple[Tensor, Tensor]]] | None = None
            for rows, images in self.batches():
                following = rows, pool.submit(self.finish, rows, images)
                if ready is not None:
                    yield ready[0], ready[1].result()
                ready = following
            if ready is not None:
                yield ready[0], ready[1].result()

    def _finish_on_stream(self) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor]]]:
        """Copy and finish the next batch on a stream of its own while the current one is used."""
        stream = torch.cuda.Stream(self.device)
        ready: tuple[np.ndarray, tuple[Tensor, Tensor]] | None = None
        for rows, images in self.batches():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                following = self.finish(rows, images)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in following:
                # Its memory must not be used again before the training stream is done with it.
                tensor.record_stream(torch.cuda.current_stream())
            ready = rows, following
        if ready is not None:
            yield ready

    @torch.inference_mode(False)  # whose tensors could not be used again in training
    def finish(self, rows: np.ndarray, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Turn a backend's batch into what the model sees, on the device."""
        height, width = self.output_size
        inputs = self._to_float(images[0], (height, width), rows, self.scale, self.shift)
        if self.index.labels is None:
            factor = self.index.scales[1]
            size = (height * factor, width * factor)
            return inputs, self._to_float(
                images[1], size, rows, self.target_scale, self.target_shift
            )
        labels = torch.from_numpy(self.index.labels[rows["sample"]])
        return inputs, labels.to(self.device, non_blocking=True)

    def _to_float(
        self, images: Tensor, size: tuple[int, int], rows: np.ndarray, scale: Tensor, shift: Tensor
    ) -> Tensor:
        full_intensity = 65535 if images.dtype == torch.uint16 else 255
        channels_first = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        batch = self._empty_batch(channels_first.shape).copy_(channels_first)
        factors = ("brightness", "contrast", "saturation")
        is_jittered = any((rows[name] != 1).any() for name in factors)
        if not is_jittered:  # while there are fewer pixels
            batch = _scale_and_shift(batch, scale / full_intensity, shift)
        if tuple(batch.shape[2:]) != size:
            enlarged = self._empty_batch(torch.Size([*batch.shape[:2], *size]))
            # interpolate(mode="bilinear") into memory that is there already
            batch = torch.ops.aten.upsample_bilinear2d.out(batch, size, False, out=enlarged)
        if is_jittered:
            batch = self._jitter_colours(rows, batch.div_(full_intensity))
            batch = _scale_and_shift(batch, scale, shift)
        return batch

    def _empty_batch(self, shape: torch.Size) -> Tensor:
        """Uninitialised float32 batch on the device.

        On the CPU, untouched memory costs a page fault every 4 KB, which is more than filling it: the
        memory of an earlier batch is used again as soon as no tensor refers to it.
        """
        memory_format = (
            torch.channels_last if self.cfg.loader.channels_last else torch.contiguous_format
        )
        if self.device.type != "cpu":
            return torch.empty(shape, device=self.device, memory_format=memory_format)
        with self.choosing_batch:
            for kept, users_when_free in self.kept_batches:
                if kept.shape == shape and _users_of_memory(kept) == users_when_free:
                    return kept.detach()  # a tensor of the same memory, so that its users count
            kept = _large_pages(shape, memory_format)
            # One batch is used while the next ones are ready or made; of pairs, each is two.
            most_kept = 2 * (2 + self.cfg.loader.prefetch_factor)
            kept_before = self.kept_batches[1 - most_kept :]
            self.kept_batches = [*kept_before, (kept, _users_of_memory(kept))]
            return kept.detach()

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Inputs of shape (B, C, H, W) as pictures: 1 or 3 channels with values in [0, 1]."""
        pictures = ((inputs.float() - self.shift) / self.scale).clamp(0, 1)
        return pictures if self.in_channels in (1, 3) else pictures[:, :1]

    def _jitter_colours(self, rows: np.ndarray, images: Tensor) -> Tensor:
        """Brightness, contrast and saturation, in this order, as torchvision's `adjust_*` do it."""

        def factor(name: str) -> Tensor:
            return torch.from_numpy(rows[name].copy()).to(self.device).view(-1, 1, 1, 1)

        def grey() -> Tensor:
            if images.shape[1] != 3:
                return images.mean(dim=1, keepdim=True)
            weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            return (images * weights).sum(dim=1, keepdim=True)

        if (rows["brightness"] != 1).any():
            images = images.mul(factor("brightness")).clamp_(0, 1)
        if (rows["contrast"] != 1).any():
            mean = grey().mean(dim=(2, 3), keepdim=True)
            images = torch.lerp(mean, images, factor("contrast")).clamp_(0, 1)
        if (rows["saturation"] != 1).any():
            images = torch.lerp(grey(), images, factor("saturation")).clamp_(0, 1)
        return images


def _scale_and_shift(batch: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """batch * scale + shift in place, with scale and shift of shape (1, C or 1, 1, 1)."""
    # The factors of a whole line at once: a loop over fewer values is several times slower.
    line = (1, batch.shape[1], 1, batch.shape[3])
    is_channels_last = batch.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
    scale, shift = (
        factor.expand(line).contiguous(memory_format=memory_format) for factor in (scale, shift)
    )
    return torch.addcmul(shift, batch, scale, out=batch)


def _large_pages(shape: torch.Size, memory_format: torch.memory_format) -> Tensor:
    """Uninitialised float32 of shape (B, C, H, W), in the large pages that NumPy asks for."""
    memory = torch.from_numpy(np.empty(shape.numel(), np.float32))
    if memory_format == torch.contiguous_format:
        return memory.view(shape)
    count, channels, height, width = shape
    return memory.view(count, height, width, channels).permute(0, 3, 1, 2)


def _users_of_memory(tensor: Tensor) -> int:
    """How many tensors, autograd's saved ones included, refer to the tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# what an error says when the machine has no more of something -> which setting to change
LIMITS = {
    "Too many open files": "raise the limit with ulimit -n 65536, or lower loader.num_workers",
    "shared memory": "the batches of the worker processes do not fit into /dev/shm: enlarge it (docker "
    "run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm), or set "
    "loader.num_workers=0, which loads with threads and without shared memory",
    "killed by signal: Killed": "most likely for lack of memory: lower loader.num_workers, "
    "loader.prefetch_factor or global_batch_size",
}


class LimitError(RuntimeError):
    """The machine has no more of something; the message names the setting to change."""


@contextmanager
def limits_explained() -> Iterator[None]:
    """Turn errors of the kinds in `LIMITS` into a `LimitError`."""
    try:
        yield
    except LimitError:
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error.__cause__, LimitError):  # which PyTorch wrapped
            raise error.__cause__ from None
        for sign, advice in LIMITS.items():
            if sign in str(error):
                what = str(error).strip(" .\n").splitlines()[-1]
                raise LimitError(f"{what}: {advice}") from error
        raise


def cpus_per_rank() -> int:
    """CPUs that this process may use, shared with the other ranks of this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (available or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
