"""The exponential moving average of the weights."""

import pytest
import torch
from torch import Tensor

from tests.faults import script_with
from tests.helpers import folder_with, replace
from tests.processes import train
from tests.results import assert_same, checkpoint_of, published, scalars_of, validated
from tests.rows import rows

pytestmark = pytest.mark.slow


OPTIONS = ["ema.decay=0.3", "checkpoint.every_steps=1", "checkpoint.keep=99", "max_steps=9"]
OPTIONS += ["global_batch_size=16", "optimizer.lr=0.02"]  # the average differs from the weights


def average_of(state: dict) -> dict[str, Tensor]:
    """The averaged model in a checkpoint."""
    return {name: state["ema"][f"module.{name}"] for name in state["model"]}


@pytest.mark.parametrize(
    ("script", "overrides"),
    [("train_ema.py", []), *rows(("train_ema_fsdp.py", ["model.kwargs.batch_norm=false"]))],
)
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
    losses = {end: metrics["val/loss"] for end, metrics in by_hand.items()}
    assert dict(scalars_of(run, "val/loss")) == pytest.approx(losses, rel=1e-4)
    trained = validated(states[-1]["model"], [*data, *overrides])
    assert abs(trained["val/loss"] - losses[9]) > 1e-3

    best = checkpoint_of(run, best=True)
    assert best["step"] == max(ends, key=lambda end: (by_hand[end]["val/top1"], -losses[end]))
    assert_same(published(run), average_of(best))


def test_a_mask_has_no_average_and_an_average_that_is_not_finite_is_not_saved(
    data, tmp_path
) -> None:
    run, script = tmp_path / "run", "train_ema.py"
    folder = script_with(tmp_path / "s", script, "if step == 4: ema.averages[0].fill_(torch.inf)")
    mask = "    model.register_buffer('mask', torch.full((3,), float('-inf')))\n"
    replace(folder / script, "    # optimizer\n", f"{mask}\n    # optimizer\n")
    options = [*data, "checkpoint.every_steps=3", "max_steps=6"]
    text = train(script, run, *options, folder=folder, code=2)
    assert "/ema/module." in text
    state = checkpoint_of(run)
    assert state["step"] == 3
    assert state["ema"]["module.mask"].equal(torch.full((3,), -torch.inf))
