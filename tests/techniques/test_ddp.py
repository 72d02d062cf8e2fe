"""Several ranks: BatchNorm, layers that are not used, and what torchrun tells."""

import pytest
import torch
from torch import nn

from runtime.distributed import convert_sync_batchnorm
from runtime.process_group import run_stamp
from tests.helpers import folder_with, make_config, replace, run_to_end
from tests.techniques import PLAIN

pytestmark = pytest.mark.slow


def test_a_layer_that_is_not_used_is_named_under_ddp(data, tmp_path) -> None:
    script = "train_ddp.py"
    folder = folder_with(tmp_path / "s", script)
    place = "    # optimizer\n"
    replace(folder / script, place, f"    model.extra = nn.Linear(3, 3)\n\n{place}")
    codes, prints = run_to_end(script, tmp_path / "run", *data, *PLAIN, folder=folder)
    for code, text in zip(codes, prints, strict=True):
        assert code == 2, text
        assert "extra.weight" in text.splitlines()[-1]


def test_sync_batchnorm_is_a_choice() -> None:
    for wanted in (True, False):
        cfg = make_config(f"distributed.sync_batchnorm={wanted}")
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        converted = convert_sync_batchnorm(cfg, model, torch.device("cuda"))
        assert isinstance(converted.get_submodule("1"), nn.SyncBatchNorm) == wanted


def test_without_torchruns_store_a_run_is_named_as_torchrun_calls_it(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert run_stamp() == "4711"
