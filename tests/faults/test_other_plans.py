"""Resuming with other data, on another number of processes, and on machines that come and go."""

import json
import shutil
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch import rendezvous
from tests.faults import NUM_STEPS, NUM_TRAIN, script_with
from tests.helpers import (
    answers_to,
    checkpoint_of,
    free_port,
    scalars_of,
    start_process,
    train,
    wait_for,
    weights_differ_by,
)
from tests.torchrun import Torchrun


def recording(folder: Path, script: str, *lines: str) -> Path:
    """The script with these lines; each rank writes its samples by step to `<folder>/seen.txt`."""
    seen = folder / "seen.txt"
    return script_with(
        folder,
        script,
        f"with open({str(seen)!r}, 'a') as file:",
        "    samples = [step, rank, train_loader.last_rows['sample'].tolist()]",
        "    file.write(f'{samples}\\n')",
        *lines,
    )


def seen_by(folder: Path) -> dict[int, list[int]]:
    """The global batch of each step, its ranks' samples in turn, as the plan deals them."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for line in (folder / "seen.txt").read_text().splitlines():
        step, rank, samples = json.loads(line)
        assert rank not in by_step.setdefault(step, {})
        by_step[step][rank] = samples
    turns = {
        step: zip(*[ranks[rank] for rank in sorted(ranks)], strict=True)
        for step, ranks in by_step.items()
    }
    return {step: [sample for turn in turns[step] for sample in turn] for step in turns}


def test_a_run_goes_on_in_mid_epoch_with_other_batches_on_more_ranks(options, tmp_path) -> None:
    """27 of the epoch's 64 rows are used; 29 of 56 are left, of which 14 + 14 serve two ranks."""
    run = tmp_path / "run"
    one, two = (recording(tmp_path / script, script) for script in ("train.py", "train_ddp.py"))
    train("train.py", run, *options, "global_batch_size=9", "max_steps=3", folder=one)
    train("train_ddp.py", run, *options, "global_batch_size=14", "resume=auto", folder=two)
    in_turn = [*seen_by(one).values(), *list(seen_by(two).values())[:2]]
    used = [sample for batch in in_turn for sample in batch]
    assert len(used) == len(set(used)) == 27 + 28
    saved, steps_per_epoch = checkpoint_of(run), NUM_TRAIN // 14
    assert saved["step"] == saved["scheduler"]["last_epoch"] == 2 * steps_per_epoch
    assert [step for step, _ in scalars_of(run, "val/loss")] == [4, 8]


def test_machines_and_the_rendezvous_come_and_go_but_no_step(options, tmp_path) -> None:
    """A run of one process makes the same steps."""
    run, whole, port = tmp_path / "run", tmp_path / "whole", free_port()
    options = [*options, "model.kwargs.batch_norm=false"]  # which depends on the number of ranks
    one_process = recording(tmp_path / "one", "train.py")
    train("train.py", whole, *options, folder=one_process)
    script = recording(tmp_path / "s", "train_ddp.py", "time.sleep(0.5)")
    (seen := script / "seen.txt").touch()
    launcher = ["--nnodes=1:2", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
    launcher += ["--rdzv_id=test", "--local_addr=127.0.0.1", "--max-restarts=9"]
    launcher += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"]
    command = [*launcher, "train_ddp.py", f"output_dir={run}", *options, "resume=auto"]

    def num_ranks() -> list[int]:
        """How many ranks have made each step."""
        lines = seen.read_text().splitlines()
        return list(Counter(line.partition(",")[0] for line in lines).values())

    def wait_for_ranks(count: int) -> None:
        """Until so many ranks have made a step more."""
        made = len(num_ranks())
        wait_for(lambda: count in num_ranks()[made:], f"a step of {count} ranks")

    with ExitStack() as stack:

        def machine(name: str) -> Torchrun:
            started = Torchrun(command, script, tmp_path / f"{name}.txt", is_elastic=True)
            return stack.enter_context(started)

        place = start_process(rendezvous.main, [str(port)])
        one, other = machine("one"), machine("other")
        wait_for_ranks(2)
        other.agent.kill()
        wait_for_ranks(1)
        another = machine("another")
        wait_for_ranks(2)
        place.kill()
        place.join()
        wait_for(lambda: "again: nothing answers there" in one.text(), "the loss to be told")
        place = start_process(rendezvous.main, [str(port)])
        wait_for_ranks(2)
        one.agent.terminate()
        assert one.wait() == 128 + signal.SIGTERM
        assert another.wait() == 0, another.text()
        text = one.text() + another.text()  # a torchrun that forks its ranks adds where it noticed
        for trace in ("\nTraceback", "[rank 0] Traceback", "[rank 1] Traceback"):
            assert trace not in text, text
        assert text.count("epoch 2 of 2:") == 1
        late = machine("late")
        assert late.wait() == 1
        assert "--rdzv_id=test has ended" in late.text()
    assert seen_by(script) == seen_by(one_process)  # disjoint and complete in each epoch
    for tag in ("train/loss", "val/loss"):
        expected = [(step, pytest.approx(loss, abs=1e-4)) for step, loss in scalars_of(whole, tag)]
        assert scalars_of(run, tag) == expected
    assert weights_differ_by(run, whole) < 1e-3
    assert (run / "train.log").read_text().count("epoch 2 of 2:") == 1


def test_other_data_is_refused_unless_the_epoch_may_start_again(options, photos, tmp_path) -> None:
    """A run that was started again goes on where it was, not where it branched off."""
    stopped, branch = tmp_path / "stopped", tmp_path / "branch"
    more, renamed = tmp_path / "more" / photos.name, tmp_path / "renamed" / photos.name
    for root in (more, renamed):
        shutil.copytree(photos, root)
    photo = next(more.glob("train/digit 0/*.png"))
    shutil.copy(photo, photo.with_name("new.png"))
    for split in renamed.iterdir():
        (split / "digit 0").rename(split / "digit 9")
    fresh = ["checkpoint.fresh_epoch=true", "epochs=1"]
    other = "made with another plan of the data ("
    rows: list[tuple[str, list[str], int, str]] = [
        ("stopped", ["max_steps=3"], 0, ""),
        ("seed", ["seed=1"], 2, f"{other}seed: 0 then, 1 now)"),
        ("more", [f"data.root={more}"], 2, f"{other}files: "),
        ("renamed", [f"data.root={renamed}", *fresh], 2, "output 0: digit 0 then, digit 1 now"),
        ("fresh", [f"data.root={more}", *fresh], 0, "plan of the data: epoch 1 is restarted"),
        ("branch", ["max_steps=5"], 0, f"resumed from {stopped}"),
        ("branch", ["max_steps=7"], 0, f"resumed from {branch}"),
    ]
    commands = [
        ["train.py", *options, f"output_dir={tmp_path}/{name}", *overrides]
        + [f"resume={stopped}"] * (name != "stopped")
        for name, overrides, _, _ in rows
    ]
    told = answers_to(commands, tmp_path)
    for (name, _, expected, message), (code, text) in zip(rows, told, strict=True):
        assert code == expected, f"{name}: {text}"
        assert message in text, f"{name}: {text}"
        assert ("checkpoint.fresh_epoch=true" in text) == (other in message), name
        assert "Traceback" not in text
    for name, step in {"fresh": NUM_STEPS // 2, "branch": 7}.items():
        assert checkpoint_of(tmp_path / name)["step"] == step
    assert (branch / "checkpoints" / "model.safetensors").exists()  # of its own best epoch
