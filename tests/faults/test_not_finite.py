"""A run whose weights, or whatever else it would save, are not finite."""

import pytest
import torch

from tests.faults import script_with
from tests.helpers import folder_with
from tests.processes import train
from tests.results import assert_same_state, checkpoint_of, steps_saved
from tests.rows import rows

NAN = "float('nan')"
RUNNING_MEAN = "next(model.buffers())"
SHARD = "next(model.parameters()).to_local()"
MOMENT = "next(iter(optimizer.state.values()))['exp_avg_sq']"


def test_a_batch_that_spoils_the_weights_ends_the_run_which_goes_on_from_before_it(
    finished, options, tmp_path
) -> None:
    """Step 6 is bad; the next log point is step 10, which would be saved, too."""
    run, names = tmp_path / "run", tmp_path / "names.txt"
    ours = "[train_loader.info.name_of(n) for n in train_loader.last_samples]"
    folder = script_with(
        tmp_path / "s",
        "train.py",
        f"if step == 6: open({str(names)!r}, 'w').write('\\n'.join({ours}) + '\\n')",
        f"if step == 6 and cfg.max_steps: inputs = inputs * {NAN}",
    )
    common = [*options, "resume=auto", "log.every_steps=5"]
    common += ["checkpoint.every_steps=5", "checkpoint.keep=4"]
    text = train("train.py", run, *common, "max_steps=99", folder=folder, code=2)
    assert "Traceback" not in text
    what, batch, fix = text.splitlines()[-3:]
    assert "/model/" in what
    for word in ("step 6 ", " nan", f"{run}/suspects.txt", ".png"):
        assert word in batch, batch
    assert f"{run}/checkpoints/step-00000005" in fix
    assert f"data.leave_out={run}/suspects.txt" in fix
    assert (run / "suspects.txt").read_text() == names.read_text()
    assert len(names.read_text().splitlines()) == 8
    assert "step-00000005: step 5" in train("train.py", run, *common, folder=folder)
    assert_same_state(run, finished)


@pytest.mark.parametrize(
    ("script", "line", "name"),
    [
        ("train.py", f"next(model.parameters()).data[0] = {NAN}", "/model/"),
        # The losses stay finite: evaluation alone uses it.
        ("train.py", f"{RUNNING_MEAN}.fill_(float('inf'))", "running_mean"),
        # So do the losses and the weights: Adam divides by it.
        ("train.py", f"{MOMENT}.fill_(float('inf'))", "exp_avg_sq"),
        *rows(
            ("train_ddp.py", "if rank == 1: inputs.fill_(float('nan'))", "rank 0"),
            ("train_ddp.py", f"if rank == 1: next(model.buffers()).fill_({NAN})", "rank 1"),
            ("train_fsdp.py", f"if rank == 1: {SHARD}.fill_(float('inf'))", "/"),
        ),
    ],
)
def test_no_state_is_saved_of_which_a_part_is_not_finite(
    script: str, line: str, name: str, options, tmp_path
) -> None:
    run = tmp_path / "run"
    spoil = ["if step == 4:", "    with torch.no_grad():", f"        {line}"]
    folder = script_with(tmp_path / "s", script, *spoil)
    options = [*options, "log.every_steps=6", "checkpoint.every_steps=3"]
    text = train(script, run, *options, folder=folder, code=2)
    assert name in text.splitlines()[-3]
    assert f"{run}/checkpoints/step-00000003" in text.splitlines()[-1]
    assert steps_saved(run) == [3]


def test_a_mask_that_is_infinite_from_the_start_is_fine(options, tmp_path) -> None:
    run, mask = tmp_path / "run", "model.register_buffer('mask', torch.full((3,), float('-inf')))"
    edits = ("import hydra\n", "import torch\n"), ("    # optimizer\n", f"    {mask}\n\n")
    folder = folder_with(tmp_path / "s", "train.py", *edits)
    for steps in (3, 5):
        train("train.py", run, *options, "resume=auto", f"max_steps={steps}", folder=folder)
    assert checkpoint_of(run)["model"]["mask"].equal(torch.full((3,), -torch.inf))
