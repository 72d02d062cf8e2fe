"""Batches with a loss that is not finite."""

from tests.faults import (
    POISON,
    assert_finite,
    assert_same,
    assert_same_state,
    bad_lines,
    script_with,
)
from tests.helpers import answers_to, checkpoint_of


def test_bad_batches_are_without_effect_named_and_counted(options, photos, tmp_path) -> None:
    names = tmp_path / "names.txt"
    files = "[train_loader.info.name_of(i) for i in train_loader.last_rows['sample'].tolist()]"
    record = f"step == 5 and open({str(names)!r}, 'w').write('\\n'.join({files}))"
    poison = f"if step in (2, 3, 5, 6): {POISON}"
    folder = script_with(tmp_path / "s", "train.py", record, poison)
    whole, run, strict = (tmp_path / name for name in ("whole", "run", "strict"))
    common = ["train.py", *options, "log.every_steps=20", "max_bad_steps=3", "checkpoint.keep=9"]
    resumed = [*common, f"output_dir={run}", "resume=auto"]
    from_five = [f"resume={run}/checkpoints/step-00000005.pt", "max_bad_steps=2"]
    commands = [
        [*common, f"output_dir={whole}"],
        *([*resumed, f"max_steps={last_step}"] for last_step in (4, 5)),
        [*common, f"output_dir={strict}", *from_five],
        resumed,
    ]
    told = answers_to(commands, tmp_path, folder=folder)
    assert [code for code, _ in told] == [0, 0, 0, 2, 0], told
    [line] = bad_lines(told[2][1])
    assert line.startswith("step 5: ")
    assert all(name in line for name in names.read_text().splitlines())
    assert line.count(str(photos)) == 8
    error = told[3][1].splitlines()[-1]
    assert "step 6: " in error
    assert "max_bad_steps=2" in error
    assert error.count(".png") == 8
    assert "Traceback" not in told[3][1]
    four, five = (checkpoint_of(run, f"step-{step:08d}.pt") for step in (4, 5))
    assert_same(four["model"], five["model"])
    assert_same(four["optimizer"]["state"], five["optimizer"]["state"])
    assert_same_state(run, whole)
    assert_finite(run, options, 4)
