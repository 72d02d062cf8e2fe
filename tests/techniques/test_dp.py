"""DataParallel."""

import torch

from runtime.data_parallel import visible_gpus
from tests.helpers import make_config


def test_data_parallel_gathers_on_the_configured_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus(make_config(), torch.device("cuda", 1)) == [1, 0, 2]
