"""Device, threads, precision and determinism of a process."""

import os
from collections.abc import Iterator
from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from runtime.setup import resolve_device, set_numerics, setup
from tests.helpers import make_config, refused


@pytest.fixture
def numerics_restored() -> Iterator[None]:
    yield
    set_numerics(make_config())


@pytest.mark.usefixtures("numerics_restored")
def test_keys_choose_the_precision_and_determinism_of_cuda(monkeypatch) -> None:
    """The older names of torch.backends stay readable, which torch.compile reads."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for chosen, *expected in [("null", False, True), ("ieee", False, False), ("tf32", True, True)]:
        set_numerics(make_config(f"fp32_precision={chosen}"))
        assert [matmul.allow_tf32, cudnn.allow_tf32] == expected
    assert (cudnn.benchmark, cudnn.deterministic) == (True, False)
    set_numerics(make_config("cudnn_benchmark=false"))
    assert not cudnn.benchmark
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_numerics(make_config("deterministic=true"))
    assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    set_numerics(make_config())
    assert not torch.are_deterministic_algorithms_enabled()


def test_torch_has_no_more_threads_than_cpus_unless_it_is_told_to(monkeypatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for num_cpus, told, expected in [(1, {}, 1), (8, {}, 3), (1, {"OMP_NUM_THREADS": "3"}, 3)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, n=num_cpus: set(range(n)))
        torch.set_num_threads(3)
        with patch.dict(os.environ, told):
            setup(make_config("device=cpu"))
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


def test_a_gpu_that_torch_cannot_use_ends_the_run_unless_it_is_hidden(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_module("runtime.setup")  # its name in `runtime` is that of a function
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert resolve_device("cpu").type == "cpu"
    with refused("NVIDIA driver", torch.__version__, "device=cpu"):
        resolve_device("auto")
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path / "none")
    assert resolve_device("auto").type == "cpu"


def test_ranks_of_a_machine_do_not_share_a_gpu(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refused("device=cuda:1 ", "device=cuda,"):
        resolve_device("cuda:1", 1)


def test_torchrun_does_not_start_a_script_for_one_process_twice(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("torchrun has started 2; start it with python"):
        setup(make_config())
