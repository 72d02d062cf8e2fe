"""What a run says before its first step."""

import logging
from typing import Any

import torch

from conf.check import changed_in
from conf.schema import Config
from runtime.group import SingleProcess

log = logging.getLogger(__name__)


def warn_of_unused_settings(
    cfg: Config, precision: torch.dtype, weights: Any, group: SingleProcess
) -> None:
    """Warn of settings of techniques that the script does not have, by what it gave to `Run`."""
    is_off = {
        "amp": precision is torch.float32 and cfg.amp.dtype != "float32",
        "ema": weights is None,
        "distributed": type(group) is SingleProcess,
    }
    for setting in changed_in(cfg, [name for name in is_off if is_off[name]]):
        log.warning("%s has no effect in this script", setting)


def log_that_nothing_is_left(cfg: Config, num_epochs: int, step_number: int) -> None:
    """Name the place where the run has ended, and the keys that ended it."""
    limits = {"epochs": cfg.epochs, "max_steps": cfg.max_steps}
    limits["early_stopping.patience"] = cfg.early_stopping.patience
    given = " ".join(f"{key}={limit}" for key, limit in limits.items() if limit is not None)
    place = f"epoch {num_epochs} (step {step_number})"
    log.info("nothing to do: the run has ended after %s; to train on, raise %s", place, given)
