"""Nothing that is not finite is saved: a run whose weights are not ends, and names the samples."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler

from conf.errors import UserError, first_few
from conf.files import write_atomically
from loaders import Loader
from models.pretrained import map_named, newest_first
from runtime.checkpoint import CheckpointWriter
from runtime.process_group import ProcessGroup
from runtime.progress import steps_done
from runtime.shards import local

SUSPECTS = "suspects.txt"
"""File in the folder of a run that such an end has written, for `data.leave_out`."""


class FiniteCheck:
    """Looks at all that a run saves: before it does so, and at log points with a loss or gradient
    norm that is not finite. A step only keeps its loss, unread, and the numbers of its samples.

    Every rank calls its methods; a UserError is raised on all. `num_steps` steps are remembered:
    those between two log points.
    """

    def __init__(
        self, state: dict[str, Any], group: ProcessGroup, writer: CheckpointWriter, num_steps: int
    ) -> None:
        self.state, self.group, self.writer, self.num_steps = state, group, writer, num_steps
        self.loader: Loader = state["loader"]
        # Number of the step, loss (of a micro-batch, divided by their number) and samples
        self.batches: deque[tuple[int, Tensor, Sequence[int]]] = deque()
        self.ignored: set[str] = set()
        scalers = (part for part in state.values() if isinstance(part, GradScaler))
        self.scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self.scales: list[float] = []  # at the last log point, or at the start

    def start(self) -> None:
        """Begin with what was loaded: buffers that are not finite now may stay so, as masks do."""
        parameters = {f"/model/{name}" for name, _ in self.state["model"].named_parameters()}
        self.ignored = self._not_finite(state_dicts(self.state)) - parameters
        self.scales = [scaler.get_scale() for scaler in self.scalers]

    def add(self, loss: Tensor) -> None:
        """Remember a batch that the loader has yielded."""
        number = steps_done(self.loader)
        while self.batches and self.batches[0][0] <= number - self.num_steps:
            self.batches.popleft()
        self.batches.append((number, loss.detach(), self.loader.last_samples))

    def log_point(self, is_finite: bool, num_steps: int) -> None:
        """Look at the state unless the mean loss since the last log point, so many steps ago, and
        the norm are finite. Raises a UserError as `check()`, or if a GradScaler has skipped all of
        these steps, though at a scale below 1 gradients rarely overflow."""
        before, self.scales = self.scales, [scaler.get_scale() for scaler in self.scalers]
        for scaler, old, scale in zip(self.scalers, before, self.scales, strict=True):
            if scale < 1 and scale <= old * scaler.get_backoff_factor() ** num_steps:
                self._end(f"every step overflows, also where the loss is scaled by {scale:.3g}")
        if not is_finite:
            self.check(state_dicts(self.state))

    def check(self, state: dict[str, Any]) -> None:
        """Raise UserError if one of the tensors in nested values is not finite on a rank."""
        for rank, names in enumerate(self.group.gather(sorted(self._not_finite(state))[:3])):
            if names:
                self._end(f"{', '.join(names)} of rank {rank} is not finite")

    def _not_finite(self, state: dict[str, Any]) -> set[str]:
        """Return the names of this rank's tensors with infinite values or NaN."""
        flags: dict[str, Tensor] = {}

        def add(name: str, value: Any) -> None:
            if not isinstance(value, Tensor) or name in self.ignored:
                return
            tensor = local(value)
            if tensor.is_floating_point() and tensor.numel():
                # Least and largest values need no memory.
                flags[name] = torch.stack(tensor.aminmax()).isfinite().all()

        map_named(add, state)
        if not flags:
            return set()
        # One copy to the host: a GPU is waited for once.
        device = next(iter(flags.values())).device
        are_finite = torch.stack([flag.to(device) for flag in flags.values()]).tolist()
        return {name for name, is_finite in zip(flags, are_finite, strict=True) if not is_finite}

    def _end(self, reason: str) -> NoReturn:
        """Write the samples of the first step whose loss is not finite, or else of all, to a file,
        and raise the UserError that says what to do."""
        self.writer.wait()  # the checkpoint that is being written is a good one
        name_of = self.loader.info.name_of
        own = [(n, loss.item(), [*map(name_of, samples)]) for n, loss, samples in self.batches]
        batches = [batch for rank in self.group.gather(own) for batch in rank]
        bad = [batch for batch in batches if not math.isfinite(batch[1])]
        number = min((n for n, _, _ in bad), default=steps_done(self.loader))
        suspects = [batch for batch in bad if batch[0] == number] or batches
        losses = [loss for n, loss, _ in batches if n == number]
        loss = sum(losses) / self.group.world_size if losses else math.nan
        names = dict.fromkeys(str(name) for _, _, samples in suspects for name in samples)
        path = self.writer.folder.parent / SUSPECTS
        if self.group.rank == 0:
            with write_atomically(path) as file:
                file.write_text("".join(f"{name}\n" for name in names), errors="surrogateescape")
        found = newest_first(self.writer.folder)
        good = f"go on from {found[0]} with resume=auto" if found else "start again"
        without = f"data.leave_out={path} checkpoint.fresh_epoch=true"
        leave_out = f"leave out bad samples with {without}, or " * self.loader.info.has_files
        raise UserError(
            f"{reason}, and is not saved\n"
            f"the loss of step {number} is {loss:.4g}; suspects: {first_few(names, 3)} ({path})\n"
            f"{leave_out}lower optimizer.lr or clip_grad_norm, and {good}"
        )


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of the objects of a run, by their names."""
    return {name: owner.state_dict() for name, owner in state.items()}
