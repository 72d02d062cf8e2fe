"""Several ranks: BatchNorm, layers that are not used, the slowest rank, and DataParallel."""

import socket

import pytest
import torch
from torch import nn

from runtime.data_parallel import visible_gpus
from runtime.distributed import convert_sync_batchnorm
from runtime.process_group import run_stamp
from tests.helpers import folder_with, make_config
from tests.processes import run_to_end, train
from tests.results import scalars_of, summary_of
from tests.techniques import PLAIN

pytestmark = pytest.mark.slow


def test_a_layer_that_is_not_used_is_named_under_ddp(data, tmp_path) -> None:
    script = "train_ddp.py"
    layer = "    # optimizer\n", "    model.extra = nn.Linear(3, 3)\n\n"
    folder = folder_with(tmp_path / "s", script, layer)
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


SLOW = """
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    model.register_forward_pre_hook(lambda *_: spend(0.5))
    if group.rank == 1:
        model.register_forward_pre_hook(lambda *_: spend(0.5))
"""
WAIT = """
            if group.rank == 0:
                spend(0.5)
"""


def test_a_slow_rank_is_named_with_its_host(tmp_path) -> None:
    """By a clock that only the script sets, since all ranks sleep on busy CPUs: rank 0 waits for
    the slow one after backward."""
    edits = [
        ("    # state: what a checkpoint holds\n", SLOW),
        ("            # clip\n", WAIT),
        ("        group=group,\n", "        clock=lambda: now[0],\n"),
    ]
    folder, run = folder_with(tmp_path / "s", "train_ddp.py", *edits), tmp_path / "run"
    options = ["loader=synthetic", "global_batch_size=400", "data.crop=[12,12]", "log.images=0"]
    options += ["log.every_steps=5", "max_steps=11"]
    text = train("train_ddp.py", run, *options, folder=folder)
    summary = summary_of(run)
    expected = {"rank": 1, "host": socket.gethostname(), "slower_by": 1.0}
    assert (summary["slowest_rank"], summary["perf/slowest_rank"]) == (expected, 1)
    assert scalars_of(run, "perf/slowest_rank") == [(5, 1), (10, 1), (11, 1)]
    assert f"rank 1 on {expected['host']}" in text.splitlines()[-3]


def test_data_parallel_gathers_on_the_configured_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus(make_config(), torch.device("cuda", 1)) == [1, 0, 2]
