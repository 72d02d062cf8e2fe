"""A run whose weights, or whatever else it would save, are not finite."""

import pytest
import torch

from tests.processes import train
from tests.results import assert_same, assert_same_state, checkpoint_of, steps_saved
from tests.rows import rows

NAN, INF = "float('nan')", "float('inf')"
RUNNING_MEAN = "next(x for name, x in model.named_buffers() if 'running_mean' in name)"
SHARD = "next(model.parameters()).to_local()"
MOMENT = "next(iter(optimizer.state.values()))['exp_avg_sq']"
AVERAGE = "ema.pairs[0][0]"
MASK = [("    # optimizer\n", f"    model.register_buffer('mask', torch.full((3,), -{INF}))\n\n")]


def test_a_batch_that_spoils_the_weights_ends_the_run_which_goes_on_from_before_it(
    finished, options, tmp_path
) -> None:
    """Step 6 is bad; the next log point is step 10, which would be saved, too."""
    run, names = tmp_path / "run", tmp_path / "names.txt"
    ours = "[train_loader.info.name_of(n) for n in train_loader.last_samples]"
    loop = [
        f"if step == 6: open({str(names)!r}, 'w').write('\\n'.join({ours}) + '\\n')",
        f"if step == 6 and cfg.max_steps: inputs = inputs * {NAN}",
    ]
    common = [*options, "resume=auto", "log.every_steps=5"]
    common += ["checkpoint.every_steps=5", "checkpoint.keep=4"]
    text = train("train.py", run, *common, "max_steps=99", loop=loop, code=2)
    assert "Traceback" not in text
    what, batch, fix = text.splitlines()[-3:]
    assert "/model/" in what
    for word in ("step 6 ", " nan", f"{run}/suspects.txt", ".png"):
        assert word in batch, batch
    assert f"{run}/checkpoints/step-00000005" in fix
    assert f"data.leave_out={run}/suspects.txt" in fix
    assert (run / "suspects.txt").read_text() == names.read_text()
    assert len(names.read_text().splitlines()) == 8
    assert "step-00000005: step 5" in train("train.py", run, *common, loop=loop)
    assert_same_state(run, finished)


@pytest.mark.parametrize(
    ("script", "line", "name"),
    [
        ("train.py", f"next(model.parameters()).data[0] = {NAN}", "/model/"),
        # The losses stay finite: evaluation alone uses it.
        ("train.py", f"{RUNNING_MEAN}.fill_({INF})", "running_mean"),
        # So do the losses and the weights: Adam divides by it.
        ("train.py", f"{MOMENT}.fill_({INF})", "exp_avg_sq"),
        *rows(
            ("train_ema.py", f"{AVERAGE}.fill_({INF})", "/ema/module."),
            ("train_ddp.py", f"if rank == 1: inputs.fill_({NAN})", "rank 0"),
            ("train_ddp.py", f"if rank == 1: {RUNNING_MEAN}.fill_({NAN})", "rank 1"),
            ("train_fsdp.py", f"if rank == 1: {SHARD}.fill_({INF})", "/"),
        ),
    ],
)
def test_no_state_is_saved_of_which_a_part_is_not_finite(
    script: str, line: str, name: str, options, tmp_path
) -> None:
    """A mask that is infinite from the start is saved, and has no average."""
    run = tmp_path / "run"
    loop = ["if step == 4:", "    with torch.no_grad():", f"        {line}"]
    options = [*options, "log.every_steps=6", "checkpoint.every_steps=3"]
    text = train(script, run, *options, loop=loop, edits=MASK, code=2)
    assert name in text.splitlines()[-3]
    assert f"{run}/checkpoints/step-00000003" in text.splitlines()[-1]
    assert steps_saved(run) == [3]
    state = checkpoint_of(run)
    for mask in (state["model"]["mask"], state.get("ema", {}).get("module.mask")):
        assert mask is None or mask.equal(torch.full((3,), -torch.inf))


@pytest.mark.parametrize("script", rows("train_amp.py"))
def test_a_scale_that_every_step_overflows_ends_the_run_once_it_is_below_1(
    script: str, options, tmp_path
) -> None:
    """Scales of 16 to 1 may be too high. The weights stay as they are all the time."""
    run = tmp_path / "run"
    options = [*options, "model.kwargs.batch_norm=false", "amp.dtype=float16", "amp.init_scale=16"]
    options += ["log.every_steps=2", "checkpoint.every_steps=4"]
    text = train(script, run, *options, loop=[f"inputs = inputs * {NAN}"], code=2)
    for shown in ("scaled by 0.25", "step 5 ", f"{run}/checkpoints/step-00000004"):
        assert shown in text
    assert steps_saved(run) == [4]


@pytest.mark.parametrize("script", rows("train_fsdp_amp.py"))
def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(script, options, tmp_path) -> None:
    """Of the gradients' parts, only one of rank 1 is infinite in step 3."""
    run, indent = tmp_path / "run", " " * 12
    overflow = f"{indent}if run.step_number == 3 and group.rank == 1:\n"
    overflow += f"{indent}    next(model.parameters()).grad.to_local().view(-1)[0] = {INF}\n"
    options = [*options, "model.kwargs.batch_norm=false", "amp.dtype=float16", "max_steps=4"]
    options += ["amp.init_scale=256", "checkpoint.every_steps=1", "checkpoint.keep=9"]
    train(script, run, *options, edits=[(f"{indent}# clip\n", overflow)])
    two, three, four = (checkpoint_of(run, step) for step in (2, 3, 4))
    assert [state["scaler"]["scale"] for state in (two, three, four)] == [256, 128, 128]
    assert_same(two["model"], three["model"])
    assert_same(two["optimizer"]["state"], three["optimizer"]["state"])
    for name, weights in four["model"].items():
        assert weights.isfinite().all()
        assert not weights.equal(three["model"][name])
