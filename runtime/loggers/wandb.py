"""Logger for Weights & Biases, which reads `WANDB_PROJECT`, `WANDB_MODE=offline` and others."""

import uuid
from pathlib import Path

import wandb
from torch import Tensor

from runtime.loggers import Logger, Settings, Values, kept_id


class WandbLogger(Logger):
    """Numbers and images by step. A resumed run continues the run whose id is in `wandb_id`."""

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        self.run = wandb.init(
            id=kept_id(run_dir / "wandb_id", lambda: uuid.uuid4().hex),
            resume="allow",
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
        )
        # W&B's own step never goes back, which a resumed run does.
        self.run.define_metric("*", step_metric="step")

    def log(self, values: Values, step: int) -> None:
        points = {
            name: [wandb.Image(image) for image in value] if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        self.run.log({**points, "step": step})

    def close(self, is_finished: bool) -> None:
        self.run.finish(exit_code=0 if is_finished else 1)
