"""GPUs that one process drives with DataParallel."""

import logging
from typing import TYPE_CHECKING

import torch

from conf.errors import UserError

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)


def visible_gpus(cfg: "Config", device: torch.device) -> list[int]:
    """Numbers of the GPUs that DataParallel uses; that of `device`, which gathers, comes first.

    Logs that nothing is gained with fewer than two.

    Raises:
        UserError: the run is on the CPU though GPUs are visible, which DataParallel would take, or the
            model is compiled.
    """
    if cfg.model.compile:
        raise UserError(
            "model.compile=true does not work with DataParallel, whose copies of the model would all "
            "compute with the weights of the first; use train_ddp.py"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type != "cuda":
        raise UserError(
            f"device={device}: DataParallel takes every visible GPU; hide the {num_gpus} GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty), or use train.py"
        )
    if num_gpus < 2:
        log.info(
            "DataParallel with %d GPUs: it runs, but nothing is gained over train.py", num_gpus
        )
    return sorted(range(num_gpus), key=lambda number: number != device.index)
