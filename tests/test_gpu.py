"""What only a CUDA device can show. `python -m pytest -m gpu` runs these on a machine with one."""

import subprocess
import sys

import pytest
import torch

from tests.helpers import REPOSITORY, SCRIPTS, checkpoint_of, has_ranks, scalars_of, summary_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STEPS = ["max_steps=20", "log.every_steps=1", "epochs=1", "optimizer=sgd", "optimizer.lr=0.01"]


def run(script: str, output_dir, *overrides: str, num_processes: int = 1) -> None:
    command = [sys.executable]
    if has_ranks(script):
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={num_processes}"]
    command += [script, f"output_dir={output_dir}", *STEPS, *overrides]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr


def losses_of(folder) -> list[float]:
    return [value for _, value in scalars_of(folder, "train/loss")]


@pytest.mark.parametrize("loader", ["pytorch", "dali", "synthetic"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_entry_point_runs_on_cuda(script: str, loader: str, tmp_path) -> None:
    run(script, tmp_path / "run", f"loader={loader}", "max_steps=3", "device=cuda")
    assert summary_of(tmp_path / "run")["device"].startswith("cuda")


def test_two_gloo_ranks_with_sync_batchnorm_match_one_process(tmp_path) -> None:
    """Both ranks share one GPU, which NCCL refuses; BatchNorm sees the global batch."""
    run("train.py", tmp_path / "one", "device=cuda:0")
    run(
        "train_ddp.py",
        tmp_path / "two",
        "device=cuda:0",
        "distributed.backend=gloo",
        num_processes=2,
    )
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), abs=2e-3)
    one, two = (checkpoint_of(tmp_path / name)["model"] for name in ("one", "two"))
    for key in one:
        if "running" in key:
            assert torch.allclose(one[key], two[key], atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_two_nccl_ranks_match_one_process(script: str, tmp_path) -> None:
    run("train.py", tmp_path / "one", "device=cuda:0")
    run(script, tmp_path / "two", num_processes=2)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), abs=2e-3)


def test_dali_on_the_gpu_trains_like_pytorch(tmp_path) -> None:
    for loader in ("pytorch", "dali"):
        run("train.py", tmp_path / loader, f"loader={loader}", "device=cuda:0")
    assert losses_of(tmp_path / "dali") == pytest.approx(losses_of(tmp_path / "pytorch"), abs=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp_follows_the_baseline_on_cuda(dtype: str, tmp_path) -> None:
    run("train.py", tmp_path / "full")
    run("train_amp.py", tmp_path / "amp", f"amp.dtype={dtype}", "amp.init_scale=1024")
    assert losses_of(tmp_path / "amp") == pytest.approx(losses_of(tmp_path / "full"), abs=0.05)


def test_float16_is_the_default_and_finds_its_scale(tmp_path) -> None:
    run("train_amp.py", tmp_path / "run", "device=cuda:0", "data.std=[0.01]")
    summary = summary_of(tmp_path / "run")
    assert summary["precision"] == "float16"
    assert summary["bad_steps"] == 0
    assert checkpoint_of(tmp_path / "run")["scaler"]["scale"] < 65536


@pytest.mark.parametrize("then", ["true", "false"])
def test_the_layout_of_the_weights_may_change_when_a_run_goes_on_on_cuda(
    then: str, tmp_path
) -> None:
    now = "false" if then == "true" else "true"
    options = ["device=cuda:0", "model.kwargs.batch_norm=false"]
    run("train.py", tmp_path / "whole", *options, f"model.channels_last={then}", "max_steps=7")
    for layout, steps in ((then, 6), (now, 7)):
        last = [f"max_steps={steps}", "resume=auto"]
        run("train.py", tmp_path / "run", *options, f"model.channels_last={layout}", *last)
    one, two = (checkpoint_of(tmp_path / name)["model"] for name in ("whole", "run"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
