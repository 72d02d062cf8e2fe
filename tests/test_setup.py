"""Devices and the precision of arithmetic."""

import os
from collections.abc import Iterator

import pytest
import torch

from runtime.setup import resolve_device, set_numerics
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


def test_a_gpu_that_cannot_be_used_ends_the_run_unless_it_is_hidden(monkeypatch, tmp_path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert not torch.cuda.is_available()  # which is known from now on
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto", driver=driver).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert resolve_device("cpu", driver=driver).type == "cpu"
    with refused("535.104.05", "device=cpu", str(torch.version.cuda)):
        resolve_device("auto", driver=driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with refused("535.104.05"):
        resolve_device("auto", driver=driver)
