"""Nothing that is not finite is saved: a run whose weights are not ends, and names the samples."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler

from conf.errors import UserError, first_few
from conf.files import write_atomically
from loaders import Loader
from runtime.checkpoint import CheckpointWriter
from runtime.checkpoint_files import map_named, newest_first
from runtime.process_group import ProcessGroup, local

SUSPECTS = "suspects.txt"
"""File in the folder of a run that such an end has written, for `data.leave_out`."""

Batches = Sequence[tuple[int, Tensor, Sequence[int]]]
"""Number of the step, loss (of a micro-batch, divided by their number) and samples of batches."""


class FiniteCheck:
    """Looks at all that a run saves: before it does so, and at log points with a loss or gradient
    norm that is not finite.

    Every rank calls its methods; a UserError is raised on all, and names the last `batches`.
    """

    def __init__(
        self, state: dict[str, Any], batches: Batches, group: ProcessGroup, writer: CheckpointWriter
    ) -> None:
        self.state, self.batches, self.group, self.writer = state, batches, group, writer
        self.loader: Loader = state["loader"]
        self.ignored: set[str] = set()

    def start(self) -> None:
        """Begin with what was loaded: buffers that are not finite now may stay so, as masks do."""
        parameters = {f"/model/{name}" for name, _ in self.state["model"].named_parameters()}
        self.ignored = self._not_finite(state_dicts(self.state)) - parameters

    def check_scale(self) -> None:
        """Raise UserError if a GradScaler has come below 1, where gradients rarely overflow; to be
        called if those of all steps since the last log point have."""
        for scaler in self.state.values():
            if isinstance(scaler, GradScaler) and scaler.get_scale() < 1:
                scale = f"{scaler.get_scale():.3g}"
                self._end(f"every step overflows, also where the loss is scaled by {scale}")

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
        number = min((n for n, _, _ in bad), default=self.loader.steps_done)
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
