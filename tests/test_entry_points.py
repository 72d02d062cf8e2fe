"""The entry points, started as a user starts them."""

import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from runtime.distributed import convert_sync_batchnorm, local_rank, visible_gpus
from runtime.process_group import run_stamp
from tests.helpers import folder_with, make_config, refused
from tests.images import small_digits
from tests.processes import execute, train, without_reader
from tests.results import (
    checkpoint_of,
    events_of,
    published,
    scalars_of,
    summary_of,
    validated,
    values_of,
    weights_differ_by,
)
from tests.torchrun import TWO_RANKS, Torchrun

pytestmark = pytest.mark.slow

TWENTY_STEPS = ["model.kwargs.batch_norm=false", "max_steps=20", "log.every_steps=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return [*small_digits(tmp_path_factory), "global_batch_size=6", "optimizer.warmup_epochs=0"]


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> Path:
    """Output folder of a run of 20 steps of `train.py`, of 11 in an epoch."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train("train.py", run, *data, *TWENTY_STEPS)
    return run


def test_with_more_epochs_a_run_goes_on_as_if_it_had_had_them(data, tmp_path) -> None:
    options = [*data, "log.images=0", "log.every_steps=1", "resume=auto"]
    for name, epochs in [("whole", 3), ("run", 2), ("run", 3)]:
        train("train.py", tmp_path / name, *options, f"epochs={epochs}")
    rates = values_of(tmp_path / "whole", "train/lr")
    assert len(rates) == 33
    assert values_of(tmp_path / "run", "train/lr")[22:] == rates[22:]
    assert events_of(tmp_path / "whole").Tags()["images"] == []


def test_a_run_leaves_every_promised_file_tag_and_value(data, plain) -> None:
    names = {path.name for path in plain.glob("[!.e]*")}  # without events.*
    assert names == {"checkpoints", "config.yaml", "run.json", "summary.json", "train.log"}
    summary, log = summary_of(plain), (plain / "train.log").read_text()
    begin = ["inputs: 20x20, 3 channels", "; float32 on cpu"]
    for shown in [*begin, "best by val/top1: val/loss ", f"logs and checkpoints: {plain}"]:
        assert shown in log
    values = (summary["steps"], summary["script"], summary["world_size"], summary["precision"])
    assert values == (20, "train.py", 1, "float32")
    parts = {"start_up", "other", "first_step", "data_wait", "compute", "validation", "saving"}
    assert summary["seconds"].keys() == parts
    for name, value in validated(published(plain), [*data, *TWENTY_STEPS]).items():
        assert summary["best"][name] == pytest.approx(value, rel=1e-4), name

    # Of speeds, the first step does not count.
    speeds, validations = ["perf/images_per_s", "perf/data_wait_share"], ["val/loss", "val/top1"]
    for tags, expected in [
        (["train/loss", "train/grad_norm", "train/lr"], [*range(1, 21)]),
        (speeds, [*range(2, 21)]),
        (validations, [11, 20]),
    ]:
        for tag in tags:
            assert [step for step, _ in scalars_of(plain, tag)] == expected, tag
    images = ["train/inputs", "val/predictions", "val/confusion"]
    assert events_of(plain).Tags()["images"] == images
    contents = events_of(plain).PluginTagToContent("hparams")  # its table of runs
    for setting in ("script", "train.py", "world_size", "precision", "float32", "max_steps"):
        assert setting.encode() in contents["_hparams_/session_start_info"]
    assert all(name.encode() in contents["_hparams_/experiment"] for name in validations)

    mean_loss = sum(values_of(plain, "train/loss")[11:]) / 9
    assert scalars_of(plain, "train/epoch_loss")[-1] == (20, pytest.approx(mean_loss))
    metrics = {"train/epoch_loss": mean_loss, **{name: summary[name] for name in validations}}
    listed = ", ".join(f"{name} {x:.4f}" for name, x in metrics.items())
    assert next(x for x in log.splitlines() if "epoch 2 of" in x).endswith(listed)


def test_clipping_bounds_the_step_and_the_logged_norm_is_the_true_one(data, plain, tmp_path):
    clipped, limit = tmp_path / "run", 1e-3
    options = [f"clip_grad_norm={limit}", "max_steps=2", "checkpoint.every_steps=1"]
    options += ["optimizer=sgd", "optimizer.kwargs={momentum:0,nesterov:false}"]
    train("train.py", clipped, *data, *TWENTY_STEPS, *options, "optimizer.weight_decay=0")
    norms = values_of(clipped, "train/grad_norm")
    assert norms[0] == pytest.approx(values_of(plain, "train/grad_norm")[0], rel=1e-4)
    assert min(norms) > 10 * limit
    rate = values_of(clipped, "train/lr")[1]
    before, after = (checkpoint_of(clipped, n)["model"] for n in (1, 2))
    change = sum((after[key] - before[key]).double().square().sum() for key in after) ** 0.5
    assert change == pytest.approx(rate * limit, rel=0.01)


def test_ranks_share_one_folder_that_is_named_by_the_time(data, tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train_ddp.py")
    command = [*TWO_RANKS, "train_ddp.py", *data, "max_steps=2"]
    with Torchrun(command, folder, tmp_path / "prints.txt") as torchrun:
        assert torchrun.wait() == 0, torchrun.text()
    (run,) = (folder / "outputs" / "train_ddp").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}", run.name)
    assert (run / "summary.json").exists()


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_a_script_of_several_processes_also_runs_as_one(script: str, data, plain, tmp_path) -> None:
    """With the weights of `train.py`."""
    run = tmp_path / "run"
    command = [script, *data, *TWENTY_STEPS, f"output_dir={run}"]
    printed = execute(command, tmp_path / "prints")
    assert f"one process; torchrun --nproc_per_node=2 {script} starts two" in printed
    assert summary_of(run)["world_size"] == 1
    assert weights_differ_by(run, plain) == 0


def test_processes_of_another_launcher_are_not_as_many_runs(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert local_rank() == 0
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
        with refused(f"{name}=8, but RANK is not set", "start it with torchrun"):
            local_rank()
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RANK", "0")
    with refused("RANK is set, but LOCAL_RANK is not", "start it with torchrun"):
        local_rank()


def test_without_torchruns_store_a_run_is_named_as_torchrun_calls_it(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert run_stamp() == "4711"


@pytest.mark.parametrize("wanted", [True, False])
def test_sync_batchnorm_is_a_choice(wanted: bool) -> None:
    cfg = make_config(f"distributed.sync_batchnorm={wanted}")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    converted = convert_sync_batchnorm(cfg, model, torch.device("cuda"))
    assert isinstance(converted.get_submodule("1"), nn.SyncBatchNorm) == wanted


def test_help_ends_silently_where_nobody_reads_on() -> None:
    assert without_reader("train.py", "--help") == (-signal.SIGPIPE, b"")


def test_data_parallel_gathers_on_the_configured_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_gpus(make_config(), torch.device("cuda", 1)) == [1, 0, 2]


def test_multirun_gives_each_job_a_folder_and_a_process_group(data, tmp_path) -> None:
    folder = folder_with(tmp_path, "train_ddp.py")
    command = ["train_ddp.py", "-m", "seed=1,2", *data, "max_steps=2"]
    execute(command, tmp_path / "prints", folder=folder)
    (sweep,) = (folder / "outputs" / "train_ddp").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    assert weights_differ_by(sweep / "0", sweep / "1") > 0
    # The start of the process is the first job's: the second one begins after its end.
    ends = [(sweep / job / "summary.json").stat().st_mtime for job in "01"]
    assert sum(summary_of(sweep / "1")["seconds"].values()) < ends[1] - ends[0] + 0.1
    for job in "01":
        assert (sweep / job / "train.log").read_text().count("small_cnn(") == 1
