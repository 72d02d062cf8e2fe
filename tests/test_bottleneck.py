"""`tools.bottleneck` measures the parts of a step, and counts operations and memory."""

import re

import pytest
import torch

from loaders import build_loaders
from tests.helpers import make_config
from tests.processes import execute
from tools.bottleneck import Step, count_flops


@pytest.mark.parametrize("groups", [1, 4])
def test_operations_are_those_of_the_layers_forward_and_backward(groups: int) -> None:
    """A convolution of 8x8 pixels, 2 operations for each weight and pixel, in the forward and for
    the gradient of its weights; then a linear layer, which also has one of its inputs."""
    cfg, cpu = make_config("model.kwargs.width=8", "global_batch_size=4"), torch.device("cpu")
    step = Step(cfg, build_loaders(cfg, cpu)[0], cpu, amp="")
    step.model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 16, 3, padding=1, groups=groups, bias=False),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 10),
    )
    batch = torch.randn(4, 4, 8, 8), torch.zeros(4, dtype=torch.int64)
    convolution = 4 * 64 * 2 * 16 * (4 // groups) * 9
    linear = 4 * 2 * 16 * 64 * 10
    assert count_flops(step, batch) == 2 * convolution + 3 * linear


def test_the_command_shows_each_part_and_the_best_number_of_workers(tmp_path) -> None:
    command = ["-m", "tools.bottleneck", "seconds=0.1", "workers=0"]
    printed = execute([*command, "global_batch_size=16"], tmp_path / "prints")
    parts = ["loader alone, num_workers=0", "model alone", "both", "operations of a sample"]
    parts += ["operations", "parameters", "gradients", "optimizer state", "activations"]
    for part in parts:
        [value] = re.findall(rf"^{part} +([\d,.]+) \w", printed, re.MULTILINE)
        assert float(value.replace(",", "")) > 0 or part == "operations", printed
    assert re.search(r"^(input|compute)-bound: with loader.num_workers=0, ", printed, re.MULTILINE)
