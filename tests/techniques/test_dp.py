"""DataParallel."""

import torch

from runtime.parallel import visible_gpus
from tests.helpers import make_config


def test_data_parallel_gathers_on_the_configured_gpu() -> None:
    assert visible_gpus(make_config(), torch.device("cuda", 1), num_gpus=3) == [1, 0, 2]
