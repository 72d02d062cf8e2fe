"""Devices, threads and the precision of arithmetic."""

import os
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from runtime.setup import resolve_device, set_numerics, setup
from tests.helpers import make_config, refused


@pytest.fixture(autouse=True)
def _numerics_restored() -> Iterator[None]:
    yield
    set_numerics(make_config())


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("null", (False, True)), ("ieee", (False, False)), ("tf32", (True, True))],
)
def test_one_key_chooses_what_cuda_computes_float32_in(chosen, expected) -> None:
    """The older names of torch.backends stay readable, which torch.compile reads."""
    set_numerics(make_config(f"fp32_precision={chosen}"))
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert (matmul.allow_tf32, cudnn.allow_tf32) == expected
    names = matmul.fp32_precision, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    assert tuple(name == "tf32" for name in names) == expected


@pytest.mark.parametrize(("num_cpus", "given", "expected"), [(1, "", 1), (8, "", 3), (1, "3", 3)])
def test_torch_has_no_more_threads_than_cpus_unless_it_is_told_to(
    num_cpus, given, expected, monkeypatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    torch.set_num_threads(3)
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


def test_deterministic_refuses_what_has_no_deterministic_algorithm(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_numerics(make_config("deterministic=true"))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    set_numerics(make_config())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    set_numerics(make_config("cudnn_benchmark=false"))
    assert not torch.backends.cudnn.benchmark
