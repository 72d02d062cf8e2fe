"""A task of one's own, as the page on tasks shows it.

The template's own have test_task_classification.py, test_task_dense.py and test_task_table.py.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from examples.tokens import Tokens
from tests.helpers import make_config
from tests.task_contract import random


def test_the_loss_over_tokens_of_the_example_is_exact_for_any_parts_of_a_batch() -> None:
    """Of 4 samples with 1, 2, 3 and 20 tokens: a rank with the first two has few."""
    no_loader: Any = None
    task = Tokens(make_config(), no_loader)
    outputs, targets = random(4, 20, 256), torch.randint(256, (4, 20))
    lengths = torch.tensor([1, 2, 3, 20])
    targets[torch.arange(20) >= lengths[:, None]] = -100
    parts = [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])]
    whole = task.loss(outputs, targets)
    torch.testing.assert_close(sum(task.loss(*part) for part in parts) / 2, whole)
    mean = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(whole, mean * 26 / (4 * task.tokens_per_sample))
    first, second = (task.sums(*part) for part in parts)
    metrics = task.metrics(first + second)
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-6)
