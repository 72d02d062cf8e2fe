"""What a run says before its first step."""

import logging
from typing import Any

import torch

from conf.check import changed_of
from conf.schema import Config
from runtime.group import SingleProcess

log = logging.getLogger(__name__)


def warn_of_unused_settings(
    cfg: Config, precision: torch.dtype, weights: Any, group: SingleProcess
) -> None:
    """Warn of settings of techniques that the script does not have, by what it gave to `Run`, and
    of those that have an effect only with others."""
    data, is_local = cfg.data, "://" not in cfg.data.root
    is_off = {
        "amp": precision is torch.float32 and cfg.amp.dtype != "float32",
        "ema": weights is None,
        "distributed": type(group) is SingleProcess,
        "accumulate_margin": cfg.accumulate_steps != "auto",
        "data.cache_gb": is_local,
        "data.retry_s": is_local,
        "data.shuffle_window": data.shuffle != "window",
        "data.num_folds": data.fold is None,
        "data.max_bad_samples": data.on_error != "skip",
        "optimizer.step_epochs": cfg.optimizer.schedule != "step",
        "optimizer.step_factor": cfg.optimizer.schedule != "step",
    }
    for setting in changed_of(cfg, [name for name in is_off if is_off[name]]):
        log.warning("%s has no effect here", setting)


def log_that_nothing_is_left(cfg: Config, num_epochs: int, step_number: int) -> None:
    """Name the place where the run has ended, and the keys that ended it."""
    limits = {"epochs": cfg.epochs, "max_steps": cfg.max_steps}
    limits["early_stopping.patience"] = cfg.early_stopping.patience
    given = " ".join(f"{key}={limit}" for key, limit in limits.items() if limit is not None)
    place = f"epoch {num_epochs} (step {step_number})"
    log.info("nothing to do: the run has ended after %s; to train on, raise %s", place, given)
