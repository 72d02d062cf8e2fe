"""`tools.bottleneck` measures the parts of a step, and counts operations and memory."""

import re
import time
from itertools import repeat

import pytest
import torch

from loaders import build_loaders
from tests.helpers import make_config, run_all
from tools.bottleneck import Step, count_flops, memory_by_use, peak_of, samples_per_s

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step() -> Step:
    cfg = make_config("model.kwargs.width=8", "global_batch_size=4", "optimizer=adamw")
    return Step(cfg, build_loaders(cfg, CPU)[0], CPU, amp="")


def replaced(step: Step, model: torch.nn.Module) -> Step:
    """The step with another model, whose operations are known."""
    step.model = model
    step.optimizer = torch.optim.AdamW(model.parameters())
    return step


@pytest.mark.parametrize("groups", [1, 4])
def test_operations_are_those_of_the_layers_forward_and_backward(step: Step, groups: int) -> None:
    """A convolution of 8x8 pixels, 2 operations for each weight and pixel, in the forward and for
    the gradient of its weights; then a linear layer, which also has one of its inputs."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 16, 3, padding=1, groups=groups, bias=False),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 10),
    )
    batch = torch.randn(4, 4, 8, 8), torch.zeros(4, dtype=torch.int64)
    convolution = 4 * 64 * 2 * 16 * (4 // groups) * 9
    linear = 4 * 2 * 16 * 64 * 10
    assert count_flops(replaced(step, model), batch) == 2 * convolution + 3 * linear


def test_memory_is_that_of_weights_gradients_moments_and_what_backward_needs(step: Step) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, bias=False))
    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    found = memory_by_use(replaced(step, model), batch)
    weights = 4 * 64 * 10
    assert (found["parameters"], found["gradients"]) == (weights, weights)
    assert found["optimizer state"] == 2 * weights + 4  # and the number of steps
    # The inputs, the logarithms of the softmax, the targets and the number of these.
    assert found["activations"] == 4 * 4 * 64 + 4 * 4 * 10 + 4 * 8 + 4


def test_a_speed_counts_the_samples_of_all_batches_after_a_warm_up() -> None:
    cfg = make_config("global_batch_size=50")
    taken = []

    def batches():
        for batch in repeat((0, 0)):
            taken.append(batch)
            yield batch

    start = time.perf_counter()
    speed = samples_per_s(batches(), None, cfg, 0.05)
    num_samples = 50 * (len(taken) - 3)
    assert num_samples / (time.perf_counter() - start) <= speed <= num_samples / 0.05


def test_the_peak_is_that_of_the_gpu_and_of_no_slice_of_it() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "Tesla T4": 65}
    assert {name: peak_of(name) for name in names} == names
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_of("a GPU") is None


def test_the_command_shows_each_part_and_the_best_number_of_workers(tmp_path) -> None:
    command = ["-m", "tools.bottleneck", "seconds=0.1", "workers=0"]
    [printed] = run_all([[*command, "global_batch_size=16"]], tmp_path)
    parts = ["loader alone, num_workers=0", "model alone", "both", "operations of a sample"]
    parts += ["operations", "parameters", "gradients", "optimizer state", "activations"]
    for part in parts:
        [value] = re.findall(rf"^{part} +([\d,.]+) \w", printed, re.MULTILINE)
        assert float(value.replace(",", "")) > 0 or part == "operations", printed
    assert re.search(r"^(input|compute)-bound: with loader.num_workers=0, ", printed, re.MULTILINE)
