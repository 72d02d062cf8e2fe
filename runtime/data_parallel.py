"""GPUs that one process drives with DataParallel."""

import logging

import torch

from conf.errors import UserError, counted
from conf.schema import Config

log = logging.getLogger(__name__)


def visible_gpus(cfg: Config, device: torch.device) -> list[int]:
    """Return the indices of all visible GPUs, first `device`, where outputs are gathered."""
    if cfg.model.compile:
        raise UserError(
            "model.compile=true does not work with DataParallel, whose copies of the model would "
            "all compute with the weights of the first; use DDP"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type != "cuda":
        raise UserError(
            f"device={device}, but train_dp.py uses all visible GPUs ({num_gpus}); set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU, or use train.py"
        )
    if num_gpus < 2:
        log.info("DataParallel with %s is no faster than train.py", counted(num_gpus, "GPU"))
    return sorted(range(num_gpus), key=lambda number: number != device.index)
