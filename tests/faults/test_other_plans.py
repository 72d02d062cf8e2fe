"""Resuming with other data, on another number of processes, and training on two nodes."""

import json
import shutil
import signal
from collections import Counter
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from launch import rendezvous
from tests.faults.helpers import (
    NUM_STEPS,
    NUM_TRAIN,
    Torchrun,
    run_to_end,
    script_with,
    wait_for,
    wait_for_end,
)
from tests.helpers import (
    FORKSERVER,
    checkpoint_of,
    events_of,
    free_port,
    scalars_of,
    summary_of,
    train,
)

PER_EPOCH = NUM_STEPS // 2


def recording(folder: Path, script: str, *lines: str) -> Path:
    """The script, with these lines, and each rank's samples of each step written to `<folder>/seen.txt`."""
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
    return {
        step: [
            sample
            for turn in zip(*[ranks[r] for r in sorted(ranks)], strict=True)
            for sample in turn
        ]
        for step, ranks in by_step.items()
    }


@pytest.fixture(scope="module")
def no_batch_norm(options) -> list[str]:
    """BatchNorm on the CPU depends on the number of ranks."""
    return [*options, "model.kwargs.batch_norm=false"]


@pytest.fixture(scope="module")
def whole(no_batch_norm, tmp_path_factory):
    """Output folder of an uninterrupted run of train.py; the samples are beside it."""
    folder = tmp_path_factory.mktemp("whole")
    script = recording(folder / "s", "train.py")
    train("train.py", folder / "run", *no_batch_norm, folder=script)
    return folder / "run"


def assert_like(run: Path, whole: Path) -> None:
    for tag in ("train/loss", "val/loss"):
        points, expected = scalars_of(run, tag), scalars_of(whole, tag)
        assert [step for step, _ in points] == [step for step, _ in expected]
        values = [value for _, value in expected]
        assert [value for _, value in points] == pytest.approx(values, abs=1e-4)
    one, other = checkpoint_of(run)["model"], checkpoint_of(whole)["model"]
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-3


@pytest.mark.parametrize("scripts", [("train.py", "train_ddp.py"), ("train_ddp.py", "train.py")])
def test_a_run_goes_on_in_mid_epoch_on_another_number_of_ranks(
    scripts: tuple[str, str], whole, no_batch_norm, tmp_path
) -> None:
    run = tmp_path / "run"
    seen: dict[int, list[int]] = {}
    for script, last_step in zip(scripts, (PER_EPOCH + 3, NUM_STEPS), strict=True):
        folder = recording(tmp_path / script, script)
        overrides = ["resume=auto", f"max_steps={last_step}"]
        train(script, run, *no_batch_norm, *overrides, folder=folder)
        steps = seen_by(folder)
        assert not steps.keys() & seen.keys()
        seen |= steps
    assert seen == seen_by(whole.parent / "s")  # each once, in the global order
    for epoch in range(2):
        steps_of_epoch = range(1 + epoch * PER_EPOCH, 1 + (epoch + 1) * PER_EPOCH)
        samples = [sample for step in steps_of_epoch for sample in seen[step]]
        assert sorted(samples) == list(range(NUM_TRAIN))
    one, other = checkpoint_of(run)["model"], checkpoint_of(whole)["model"]
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-3
    losses = [value for _, value in scalars_of(whole, "train/loss")]
    assert [value for _, value in scalars_of(run, "train/loss")] == pytest.approx(losses, abs=1e-4)


def test_a_run_goes_on_in_mid_epoch_with_other_batches_on_more_ranks(options, tmp_path) -> None:
    """Of the epoch's 64 rows 27 are used; 29 of 56 are left, of which 14 + 14 make batches of two ranks."""
    run = tmp_path / "run"
    train("train.py", run, *options, "global_batch_size=9", "max_steps=3")
    train("train_ddp.py", run, *options, "global_batch_size=14", "resume=auto")
    saved, steps_per_epoch = checkpoint_of(run), NUM_TRAIN // 14
    assert saved["step"] == saved["scheduler"]["last_epoch"] == 2 * steps_per_epoch
    assert [step for step, _ in scalars_of(run, "val/loss")] == [4, 8]


def test_two_nodes_train_like_one_process_and_write_once(whole, no_batch_norm, tmp_path) -> None:
    """Two agents on this machine, each with one rank, whose local rank is 0."""
    run, script = tmp_path / "run", recording(tmp_path / "s", "train_ddp.py")
    launcher = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.1"]
    overrides = ["train_ddp.py", launcher, *no_batch_norm]
    with (
        Torchrun(script, run, *overrides) as one,
        Torchrun(script, run, *overrides) as other,
    ):
        assert wait_for_end(one, other) == [0, 0], one.text() + other.text()
        one.all_gone()
        other.all_gone()
    assert seen_by(script) == seen_by(whole.parent / "s")  # disjoint and complete in each epoch
    assert_like(run, whole)
    assert summary_of(run)["world_size"] == 2
    assert len(list(run.glob("events.*"))) == 1
    log = (run / "train.log").read_text()
    assert log.count("epoch 1 of 2:") == log.count("epoch 2 of 2:") == 1
    assert (one.text() + other.text()).count("epoch 2 of 2:") == 1
    assert events_of(run).Tags()["images"] == ["train/inputs", "val/predictions", "val/confusion"]


def test_machines_and_the_rendezvous_come_and_go_and_no_step_is_lost_or_made_twice(
    whole, no_batch_norm, tmp_path
) -> None:
    run, port = tmp_path / "run", free_port()
    script = recording(tmp_path / "s", "train_ddp.py", "time.sleep(0.5)")
    launcher = ["--nnodes=1:2", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
    launcher += ["--rdzv_id=test", "--local_addr=127.0.0.1", "--max-restarts=9"]
    launcher += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"]
    overrides = ["train_ddp.py", launcher, *no_batch_norm, "resume=auto"]

    def meeting_place() -> ForkServerProcess:
        process = FORKSERVER.Process(target=rendezvous.main, args=([str(port)],))
        process.start()
        return process

    def wait_for_ranks(count: int) -> None:
        """Until so many ranks have made a step more."""
        made = len(seen_by(script)) if (script / "seen.txt").exists() else 0

        def have_made() -> bool:
            lines = (script / "seen.txt").read_text() if (script / "seen.txt").exists() else ""
            ranks = Counter(line.partition(",")[0] for line in lines.splitlines())
            return any(number == count for number in list(ranks.values())[made:])

        wait_for(have_made, f"a step of {count} ranks")

    with ExitStack() as stack:

        def machine() -> Torchrun:
            return stack.enter_context(Torchrun(script, run, *overrides, is_elastic=True))

        place = meeting_place()
        stack.callback(lambda: place.kill())
        one, other = machine(), machine()
        wait_for_ranks(2)
        other.agent.kill()
        wait_for_ranks(1)
        another = machine()
        wait_for_ranks(2)
        place.kill()
        place.join()
        wait_for(lambda: "again: nothing answers there" in one.text(), "the loss to be told")
        place = meeting_place()
        wait_for_ranks(2)
        one.agent.terminate()
        assert wait_for_end(one) == [128 + signal.SIGTERM]
        assert wait_for_end(another) == [0], another.text()
        text = one.text() + another.text()
        assert "Traceback" not in text
        late = machine()
        assert wait_for_end(late) == [1]
        assert "--rdzv_id=test has ended" in late.text()
    assert seen_by(script) == seen_by(whole.parent / "s")
    assert_like(run, whole)


@pytest.fixture(scope="module")
def stopped_once(options, tmp_path_factory) -> Path:
    """Output folder of a run that stopped in its first epoch."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    train("train.py", run, *options, "max_steps=3")
    return run


@pytest.fixture
def stopped(stopped_once, tmp_path) -> Path:
    return Path(shutil.copytree(stopped_once, tmp_path / "run", copy_function=shutil.copy))


def test_another_seed_is_refused_unless_a_fresh_epoch_is_allowed(stopped, options) -> None:
    other = [*options, "resume=auto", "seed=1"]
    codes, [text] = run_to_end("train.py", stopped, *other)
    assert codes == [2]
    assert "made with another plan of the data (seed: 0 then, 1 now)" in text
    assert "checkpoint.fresh_epoch=true" in text
    assert checkpoint_of(stopped)["step"] == 3

    text = train("train.py", stopped, *other, "checkpoint.fresh_epoch=true", "epochs=1")
    assert "another plan of the data: epoch 1 starts again" in text
    assert checkpoint_of(stopped)["step"] == PER_EPOCH


def test_renamed_classes_are_refused_also_with_a_fresh_epoch(
    stopped, options, photos, tmp_path
) -> None:
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    for split in ("train", "val"):
        (data / split / "class0").rename(data / split / "class9")
    other = [*options, f"data.root={data}", "resume=auto", "checkpoint.fresh_epoch=true"]
    codes, [text] = run_to_end("train.py", stopped, *other)
    assert codes == [2], text
    assert "output 0: class0 then, class1 now" in text
    assert checkpoint_of(stopped)["step"] == 3


def test_an_added_file_is_refused_naming_the_files(options, photos, tmp_path) -> None:
    data, run = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(photos, data)
    overrides = [*options, f"data.root={data}", "resume=auto"]
    train("train.py", run, *overrides, "max_steps=3")
    shutil.copy(data / "train" / "class0" / "000.jpg", data / "train" / "class0" / "new.jpg")
    codes, [text] = run_to_end("train.py", run, *overrides)
    assert codes == [2]
    assert "made with another plan of the data (files: " in text
    assert "seed" not in text.split("another plan of the data")[1].splitlines()[0]
    train("train.py", run, *overrides, "checkpoint.fresh_epoch=true", "epochs=1")
    assert checkpoint_of(run)["step"] == PER_EPOCH


def test_a_restarted_run_goes_on_where_it_was_not_where_it_branched_off(
    stopped, options, tmp_path
) -> None:
    """As after a requeue: the same command again."""
    run = tmp_path / "branch"
    for last_step, resumed_from in ((5, stopped), (7, run)):
        text = train("train.py", run, *options, f"resume={stopped}", f"max_steps={last_step}")
        assert f"resumed from {resumed_from}" in text
        assert checkpoint_of(run)["step"] == last_step
        assert (run / "checkpoints" / "model.safetensors").exists()  # of its own best epoch
