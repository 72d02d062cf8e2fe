"""Nothing that is not finite is saved: a run whose weights are not ends, and names the samples."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

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


class Batch(NamedTuple):
    """A batch of one rank since the last log point; of micro-batches, there are several a step."""

    step: int
    loss: Any
    samples: Sequence[Any]


class FiniteCheck:
    """Looks at all that a run saves: before it does so, and at log points with a loss or gradient
    norm that is not finite. A step only keeps its loss, unread, and the numbers of its samples.

    Every rank calls its methods; a UserError is raised on all.
    """

    def __init__(
        self,
        state: dict[str, Any],
        loader: Loader,
        group: ProcessGroup,
        writer: CheckpointWriter,
    ) -> None:
        self.state, self.loader, self.group, self.writer = state, loader, group, writer
        # Those since the last log point; at a log point and a save after it, since that before.
        self.batches: list[Batch] = []
        self.is_logged = True
        self.ignored: set[str] = set()
        parts = [part for part in state.values() if isinstance(part, GradScaler)]
        self.scalers = [part for part in parts if part.is_enabled()]
        self.scales = [scaler.get_scale() for scaler in self.scalers]

    def start(self) -> None:
        """Begin with what was loaded: buffers that are not finite now may stay so, as masks do."""
        state = {name: owner.state_dict() for name, owner in self.state.items()}
        parameters = {f"/model/{name}" for name, _ in self.state["model"].named_parameters()}
        self.ignored = self._not_finite(state) - parameters
        self.scales = [scaler.get_scale() for scaler in self.scalers]

    def add(self, loss: Tensor) -> None:
        """Remember a batch that the loader has yielded."""
        if self.is_logged:
            self.batches, self.is_logged = [], False
        samples = self.loader.last_samples
        self.batches.append(Batch(steps_done(self.loader), loss.detach(), samples))

    def log_point(self, is_finite: bool) -> None:
        """Begin with new batches after this point, if all is well.

        Args:
            is_finite: whether the mean loss since the last log point and the last norm are.

        Raises:
            UserError: what would be saved is not finite; or a GradScaler has skipped every step
                since the last log point, though at a scale below 1 gradients rarely overflow.
        """
        if self.is_logged:
            return
        num_steps = self.batches[-1].step - self.batches[0].step + 1
        for number, scaler in enumerate(self.scalers):
            before, scale = self.scales[number], scaler.get_scale()
            if scale < 1 and scale <= before * scaler.get_backoff_factor() ** num_steps:
                self._end(f"every step overflows, also where the loss is scaled by {scale:.3g}")
            self.scales[number] = scale
        if not is_finite:
            self.check({name: owner.state_dict() for name, owner in self.state.items()})
        self.is_logged = True

    def check(self, state: dict[str, Any]) -> None:
        """Look at the tensors in nested values.

        Raises:
            UserError: one of them is not finite on a rank.
        """
        for rank, names in enumerate(self.group.gather(sorted(self._not_finite(state))[:3])):
            if names:
                self._end(f"{', '.join(names)} of rank {rank} is not finite")

    def _not_finite(self, state: dict[str, Any]) -> set[str]:
        """Return the names of this rank's tensors with infinite values or NaN."""
        tensors: dict[str, Tensor] = {}

        def add(name: str, value: Any) -> None:
            if isinstance(value, Tensor) and value.is_floating_point():
                tensor = local(value)
                if tensor.numel() and name not in self.ignored:
                    tensors[name] = tensor

        map_named(add, state)
        if not tensors:
            return set()
        # Least and largest values need no memory, and a GPU is waited for once.
        flags = [torch.stack(tensor.aminmax()).isfinite().all() for tensor in tensors.values()]
        are_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return {name for name, is_finite in zip(tensors, are_finite, strict=True) if not is_finite}

    def _end(self, reason: str) -> NoReturn:
        self.writer.wait()  # the checkpoint that is being written is a good one
        info = self.loader.info
        own = [
            Batch(batch.step, batch.loss.item(), [str(info.name_of(n)) for n in batch.samples])
            for batch in self.batches
        ]
        batches = [batch for rank in self.group.gather(own) for batch in rank]
        raise UserError(self.group.broadcast_from_rank0(lambda: self._explain(reason, batches)))

    def _explain(self, reason: str, batches: list[Batch]) -> str:
        """Write the samples of the first batches whose loss is not finite, or else of all, to a
        file; return what to do."""
        bad = [batch for batch in batches if not math.isfinite(batch.loss)]
        first = min((batch.step for batch in bad), default=None)
        suspects = [batch for batch in bad if batch.step == first] or batches
        names = dict.fromkeys(name for batch in suspects for name in batch.samples)
        path = self.writer.folder.parent / SUSPECTS
        with write_atomically(path) as file:
            file.write_text("".join(f"{name}\n" for name in names))
        lines = [f"{reason}, and is not saved"]
        if suspects:
            steps = sorted({batch.step for batch in suspects})
            where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            loss = f"the loss of {where} is {suspects[0].loss:.4g}"
            lines.append(f"{loss}; its samples are in {path}: {first_few(names, 3)}")
        found = newest_first(self.writer.folder)
        good = f"go on from {found[0]} with resume=auto" if found else "start again"
        lines.append(
            f"leave out bad samples with data.leave_out={path} checkpoint.fresh_epoch=true, or "
            f"lower optimizer.lr or clip_grad_norm, and {good}"
        )
        return "\n".join(lines)
