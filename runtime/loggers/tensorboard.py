"""Logger that writes TensorBoard events to the run's folder."""

from pathlib import Path

from torch import Tensor
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from runtime.loggers import Logger, Settings, Values

GAP = 2  # pixels around each image of a grid


class TensorBoardLogger(Logger):
    """Numbers and images as events, and a row in TensorBoard's table of runs (`hparams`)."""

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        self.run_dir, self.settings = run_dir, settings
        self.purge_step = step + 1 if step else None
        self.metrics: set[str] = set()
        self.writer: SummaryWriter | None = None

    def log(self, values: Values, step: int) -> None:
        if self.writer is None:  # a run that fails before its first step leaves no events
            self.writer = SummaryWriter(str(self.run_dir), purge_step=self.purge_step)
        for name, value in values.items():
            if isinstance(value, Tensor):
                framed = F.pad(value, (GAP,) * 4, value=0.5)
                self.writer.add_images(name, framed, step)
            else:
                self.writer.add_scalar(name, value, step)
                self.metrics |= {name} if name.startswith("val/") else set()

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is None:
            return
        # add_hparams() would write to a run of its own.
        for summary in hparams(dict(self.settings), dict.fromkeys(sorted(self.metrics))):
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        self.writer.close()
