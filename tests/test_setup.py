"""Devices, threads and the precision of arithmetic."""

import os
from collections.abc import Iterator

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


@pytest.fixture
def three_threads(monkeypatch) -> Iterator[None]:
    """Of torch; no variable of the environment chooses them."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_cpus", "given", "expected"), [(1, "", 1), (8, "", 3), (1, "3", 3)])
def test_torch_has_no_more_threads_than_cpus_unless_it_is_told_to(
    num_cpus, given, expected, three_threads, monkeypatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    setup(make_config("device=cpu"))
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("load_per_cpu", "variable", "is_told"),
    [(3, "", True), (1, "", False), (3, "OMP_WAIT_POLICY=passive", False)],
)
def test_a_run_on_busy_cpus_names_the_variable_that_helps(
    load_per_cpu, variable, is_told, three_threads, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load_per_cpu * (os.cpu_count() or 1), 0, 0))
    if variable:
        monkeypatch.setenv(*variable.split("="))
    with caplog.at_level("INFO"):
        setup(make_config("device=cpu"))
    assert ("OMP_WAIT_POLICY=passive" in caplog.text) == is_told


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
