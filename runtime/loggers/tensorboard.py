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
        self.settings, self.metrics = dict(settings), set[str]()
        self.writer = SummaryWriter(str(run_dir), purge_step=step + 1 if step else None)

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                framed = F.pad(value, (GAP,) * 4, value=0.5)
                self.writer.add_images(name, framed, step)
            else:
                self.writer.add_scalar(name, value, step)
                self.metrics |= {name} if name.startswith("val/") else set()
        self.writer.flush()

    def close(self, is_finished: bool) -> None:
        # add_hparams() would write to a run of its own.
        for summary in hparams(self.settings, dict.fromkeys(sorted(self.metrics))):
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        self.writer.close()
