"""The exponential moving average of the weights."""

import pytest
import torch
from torch import Tensor, nn

from runtime.ema import EMA
from tests.faults import assert_same, script_with
from tests.helpers import (
    Operations,
    checkpoint_of,
    folder_with,
    published,
    replace,
    run_to_end,
    scalars_of,
    train,
    validated,
)
from tests.parts import rows_of

pytestmark = pytest.mark.slow


OPTIONS = ["ema.decay=0.3", "checkpoint.every_steps=1", "checkpoint.keep=99", "max_steps=9"]
OPTIONS += ["global_batch_size=16", "optimizer.lr=0.02"]  # the average differs from the weights


def average_of(state: dict) -> dict[str, Tensor]:
    """The averaged model in a checkpoint."""
    return {name: state["ema"][f"module.{name}"] for name in state["model"]}


@pytest.mark.parametrize(("script", "overrides"), [("train_ema.py", []), *rows_of("AVERAGES")])
def test_the_average_is_what_is_evaluated_chosen_and_published(
    script: str, overrides: list[str], data, tmp_path
) -> None:
    run, folder = tmp_path / "run", folder_with(tmp_path / "s", script)
    train(script, run, *data, *OPTIONS, *overrides, folder=folder)
    expected: dict[str, Tensor] = {}
    states = [checkpoint_of(run, step) for step in range(1, 10)]
    for n, state in enumerate(states):
        decay = min(0.3, (1 + n) / (10 + n)) if n else 0
        for name, now in state["model"].items():
            average = decay * expected.get(name, now) + (1 - decay) * now
            expected[name] = average if now.is_floating_point() else now
        torch.testing.assert_close(average_of(state), expected, rtol=1e-4, atol=1e-6)
        assert state["ema"]["n_averaged"] == n + 1

    ends = [4, 8, 9]  # of epochs
    by_hand = {end: validated(average_of(states[end - 1]), [*data, *overrides]) for end in ends}
    for tag in ("val/loss", "val/top1"):
        expected_values = {end: metrics[tag] for end, metrics in by_hand.items()}
        assert dict(scalars_of(run, tag)) == pytest.approx(expected_values, rel=1e-4)
    trained = validated(states[-1]["model"], [*data, *overrides])
    assert abs(trained["val/loss"] - by_hand[9]["val/loss"]) > 1e-3

    best = checkpoint_of(run, best=True)
    ranks = {end: (metrics["val/top1"], -metrics["val/loss"]) for end, metrics in by_hand.items()}
    assert best["step"] == max(ends, key=lambda end: ranks[end])
    assert_same(published(run), average_of(best))


def test_an_average_follows_all_layers_in_a_few_operations() -> None:
    for num_layers in (1, 40):
        model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(num_layers)))
        average = EMA(model, 0.9)
        model(torch.rand(2, 3, 4, 4))
        with Operations() as operations:
            average.update(model)
        assert operations.num_calls <= 6
        counted = [v for k, v in average.weights().items() if k.endswith("tracked")]
        assert [*map(int, counted)] == [1] * num_layers


def test_a_mask_has_no_average_and_an_average_that_is_not_finite_is_not_saved(
    data, tmp_path
) -> None:
    run, script = tmp_path / "run", "train_ema.py"
    folder = script_with(tmp_path / "s", script, "if step == 4: ema.averages[0].fill_(torch.inf)")
    mask = "    model.register_buffer('mask', torch.full((3,), float('-inf')))\n"
    replace(folder / script, "    # optimizer\n", f"{mask}\n    # optimizer\n")
    options = [*data, "checkpoint.every_steps=3", "max_steps=6"]
    codes, [text] = run_to_end(script, run, *options, folder=folder)
    assert codes == [2], text
    assert "/ema/module." in text
    state = checkpoint_of(run)
    assert state["step"] == 3
    assert state["ema"]["module.mask"].equal(torch.full((3,), -torch.inf))
