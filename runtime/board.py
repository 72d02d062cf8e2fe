"""TensorBoard events that a full disk does not turn into a failed run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

log = logging.getLogger(__name__)


class Board:
    """Writes events to the run's folder, or nowhere while it is closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def open(self, step: int) -> None:
        """Unless it is open: write from now on, hiding points after `step` of a run that was resumed."""
        with self._closed_if_it_fails():
            if self.writer is None:
                self.writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def scalars(self, values: dict[str, float], step: int) -> None:
        # All in one event: add_scalar() would write one for each value.
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        with self._closed_if_it_fails():
            if self.writer is not None:
                self.writer._get_file_writer().add_summary(summary, step)

    def images(self, tag: str, images: Tensor, step: int) -> None:
        """Images of shape (N, 1 or 3, H, W) with values in [0, 1]."""
        with self._closed_if_it_fails():
            if self.writer is not None:
                self.writer.add_images(tag, images, step)

    def table(self, settings: dict[str, float | str | bool], metrics: dict[str, float]) -> None:
        """A row in the table of runs; the metrics must have been written as scalars."""
        with self._closed_if_it_fails():
            if self.writer is not None:
                # add_hparams() would write to a run of its own.
                for part in hparams(settings, dict.fromkeys(metrics)):
                    self.writer._get_file_writer().add_summary(part)

    def flush(self) -> None:
        with self._closed_if_it_fails():
            if self.writer is not None:
                self.writer.flush()

    def close(self) -> None:
        with self._closed_if_it_fails():
            if self.writer is not None:
                self.writer.close()

    @contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        """A full disk is no reason to stop training here; the next epoch tries again."""
        try:
            yield
        except OSError as error:
            log.warning("TensorBoard events are lost until the next epoch: %s", error)
            self.writer = None
