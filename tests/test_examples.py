"""The examples of an augmentation and of a task of one's own work."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from examples.invert import Invert
from examples.tokens import Tokens
from tests.helpers import make_config


def test_the_example_of_an_augmentation_inverts_what_its_numbers_choose() -> None:
    invert, images = Invert(), torch.rand(2, 3, 8, 8)
    rows = np.zeros(2, [*invert.columns])
    data: Any = SimpleNamespace(invert=0.5)
    invert.draw(rows, rows, data, lambda name, num: np.array([[0.1], [0.9]]))
    assert torch.equal(invert.apply(images, rows), torch.stack([1 - images[0], images[1]]))


def test_the_loss_over_tokens_of_the_example_is_exact_for_any_parts_of_a_batch() -> None:
    """Of 4 samples with 1, 2, 3 and 20 tokens: a rank with the first two has few."""
    no_loader: Any = None
    task = Tokens(make_config(), no_loader)
    outputs, targets = torch.randn(4, 20, 256), torch.randint(256, (4, 20))
    lengths = torch.tensor([1, 2, 3, 20])
    targets[torch.arange(20) >= lengths[:, None]] = -100
    parts = [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])]
    whole = task.loss(outputs, targets)
    torch.testing.assert_close(sum(task.loss(*part) for part in parts) / 2, whole)
    mean = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(whole, mean * 26 / (4 * task.tokens_per_sample))
    first, second = (task.sums(*part) for part in parts)
    assert task.metrics(first + second)["loss"] == pytest.approx(mean.item(), rel=1e-6)
