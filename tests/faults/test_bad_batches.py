"""Batches whose loss is not finite, ranks that raise, that hang, and that end while they tell."""

import json
import os
import pickle
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from runtime import preemption
from runtime.distributed import FLIGHT_RECORD, DeviceWork, Heartbeat
from tests.faults.helpers import (
    NUM_STEPS,
    assert_same_state,
    join,
    run_to_end,
    script_with,
)
from tests.helpers import (
    FORKSERVER,
    checkpoint_of,
    fork,
    summary_of,
    train,
    validated,
)


def poison(folder, script: str, condition: str, record: str = "None"):
    """The script with inputs that are not numbers in the steps of `condition`."""
    return script_with(
        folder,
        script,
        record,
        f"if {condition}:",
        "    inputs = inputs * float('nan')",
    )


def all_finite(state) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def test_a_batch_of_nan_changes_nothing_and_is_named(options, photos, tmp_path) -> None:
    """Step 5 has no effect; what is looked at every 20 steps only does not poison those between."""
    names = tmp_path / "names.json"
    record = (
        f"step == 5 and open({str(names)!r}, 'w').write(__import__('json').dumps("
        "[train_loader.index.files[0][i] for i in train_loader.last_rows['sample'].tolist()]))"
    )
    folder = poison(tmp_path / "s", "train.py", "step == 5", record)
    run, before = tmp_path / "run", tmp_path / "before"
    seldom = [*options, "log.every_steps=20"]
    printed = train("train.py", run, *seldom, "max_steps=5", folder=folder)
    train("train.py", before, *seldom, "max_steps=4")
    for name in ("model", "optimizer"):
        one, other = checkpoint_of(run)[name], checkpoint_of(before)[name]
        tensors = zip(flat_tensors(one), flat_tensors(other), strict=True)
        assert all(torch.equal(*pair) for pair in tensors), name
    assert summary_of(run)["bad_steps"] == 1
    assert summary_of(before)["bad_steps"] == 0
    line = next(line for line in printed.splitlines() if "gradient norm is not finite" in line)
    assert line.startswith("step 5: ")
    assert all(name in line for name in json.loads(names.read_text()))
    assert line.count(str(photos)) == 8


def flat_tensors(state) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [x for value in state for x in flat_tensors(value)] if isinstance(state, list) else []


def test_bad_steps_are_counted_over_a_resume_with_the_same_bits(options, tmp_path) -> None:
    folder = poison(tmp_path / "s", "train.py", "step in (2, 3, 9)")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train("train.py", whole, *options, folder=folder)
    for last_step in (3, NUM_STEPS):
        train("train.py", stopped, *options, f"max_steps={last_step}", "resume=auto", folder=folder)
    assert_same_state(stopped, whole)
    assert summary_of(stopped)["bad_steps"] == summary_of(whole)["bad_steps"] == 3
    assert all_finite(checkpoint_of(whole)["model"])
    expected = validated(checkpoint_of(whole)["model"], options)
    assert summary_of(whole)["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        ("train_ddp.py", []),
        ("train_ddp_amp.py", ["amp.dtype=bfloat16"]),
        ("train_fsdp.py", ["optimizer=sgd"]),
        ("train_amp_fsdp.py", ["amp.dtype=float16", "amp.init_scale=1"]),
    ],
)
def test_a_batch_of_nan_on_one_rank_is_skipped_by_all(
    script: str, overrides: list[str], options, tmp_path
) -> None:
    folder = poison(tmp_path / "s", script, "step == 5 and rank == 1")
    codes, prints = run_to_end(
        script, tmp_path / "run", *options, *overrides, "max_steps=6", folder=folder
    )
    assert codes == [0, 0], prints
    for rank, text in enumerate(prints):
        lines = [line for line in text.splitlines() if "gradient norm is not finite" in line]
        assert len(lines) == 1
        assert "step 5: " in lines[0]
        assert lines[0].startswith("[rank 1] ") == (rank == 1)
        assert lines[0].count(".jpg") == 4  # its own half of the batch
    summary, weights = summary_of(tmp_path / "run"), checkpoint_of(tmp_path / "run")["model"]
    assert summary["bad_steps"] == 1
    assert all_finite(weights)
    tolerance = 0.02 if "amp" in script else 1e-4
    expected = validated(weights, options)["val/loss"]
    assert summary["val/loss"] == pytest.approx(expected, rel=tolerance)


def test_too_many_bad_steps_in_a_row_stop_the_run(options, tmp_path) -> None:
    folder = poison(tmp_path / "s", "train.py", "step != 3 and step != 4")
    codes, [text] = run_to_end(
        "train.py", tmp_path / "run", *options, "max_bad_steps=3", folder=folder
    )
    assert codes == [2]
    error = next(line for line in text.splitlines() if "max_bad_steps=3" in line)
    assert "step 7: " in error
    assert error.count(".jpg") == 8
    assert "max_bad_steps=3 in a row" in error
    assert "Traceback" not in text


def test_a_rank_that_raises_shows_its_traceback_once_and_the_other_ends_too(
    options, tmp_path
) -> None:
    folder = script_with(tmp_path / "s", "train_ddp.py", "assert step < 3 or rank == 0, 'ouch'")
    codes, prints = run_to_end("train_ddp.py", tmp_path / "run", *options, folder=folder)
    assert codes == [1, 1]
    assert prints[1].count("[rank 1] Traceback") == 1
    assert prints[1].count("[rank 1] AssertionError: ouch") == 1
    assert "Traceback" not in prints[0]
    assert prints[0].count("[rank 0] stops, because another rank has:") == 1


def test_ranks_that_have_no_torchrun_end_by_a_mistake(options, tmp_path) -> None:
    lines = ["from conf.errors import UserError", "raise UserError('say it')"]
    folder = script_with(tmp_path / "s", "train_ddp.py", *lines)
    codes, texts = run_to_end("train_ddp.py", tmp_path / "run", *options, folder=folder)
    assert codes == [2, 2]
    assert texts[0].count("say it") == 1, texts
    assert "Traceback" not in "".join(texts)


def test_a_rank_that_hangs_is_named_with_the_line_where_it_stands(options, tmp_path) -> None:
    folder = script_with(
        tmp_path / "s", "train_ddp.py", "if step == 3 and rank == 1:", "    time.sleep(1000)"
    )
    overrides = [*options, "global_batch_size=9", "distributed.timeout_s=20"]
    processes, prints = fork(
        "train_ddp.py", tmp_path / "run", *overrides, folder=folder, num_ranks=3
    )
    for rank in (0, 2):
        processes[rank].join(240)
    codes = join(processes, timeout=0)
    assert codes == [1, None, 1]  # torchrun ends the rank that sleeps, with SIGKILL
    text = prints[0].read_text() + prints[2].read_text()
    assert "a collective timed out; missing: rank 1. Where each rank stood:" in text
    assert "missing: rank 0" not in text
    assert "missing: rank 2" not in text
    assert re.search(r"rank 1: \d+ s ago at train_ddp.py:\d+ \(time.sleep\(1000\)\)", text)
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: \d+ s ago at (train_ddp|group|launch).py", text)
        record = tmp_path / "run" / f"flight_record_rank_{rank}"
        assert f"this rank's collectives: {record}" in text
        last = pickle.loads(record.read_bytes())["entries"][-1]
        assert last["profiling_name"].startswith("gloo:")


def test_a_rank_whose_device_waits_for_another_one_reports_and_ends(tmp_path) -> None:
    """NCCL raises no error in Python, where the main thread waits for the device."""
    prints = tmp_path / "prints.txt"
    process = FORKSERVER.Process(target=_wait_for_the_device, args=(prints,))
    process.start()
    process.join(240)
    assert process.exitcode == 1
    text = prints.read_text()
    assert "[rank 0] a collective timed out; missing: rank 1. Where each rank stood:" in text
    assert re.search(r"rank 0: \d+ s ago at test_bad_batches.py:\d+ \(time.sleep\(1000\)\)", text)
    assert f"this rank's collectives: {tmp_path}/new/record0" in text
    assert (tmp_path / "new" / "record0").read_bytes() == b"all of them"


def test_a_rank_whose_device_waits_for_a_failed_one_ends_soon(tmp_path) -> None:
    prints = tmp_path / "prints.txt"
    process = FORKSERVER.Process(target=_wait_for_the_device, args=(prints, 1e9, True))
    process.start()
    process.join(240)
    assert process.exitcode == 1
    assert "[rank 0] stops, because another rank has" in prints.read_text()


class Stuck(DeviceWork):
    """A device that is busy with the same work for a second more in each heartbeat."""

    asked = 0

    def overdue_s(self) -> float:
        self.asked += 1
        return float(self.asked)


def _wait_for_the_device(prints: Path, timeout_s: float = 20.0, has_failed: bool = False) -> None:
    os.environ[FLIGHT_RECORD] = str(prints.parent / "new" / "record")
    os.dup2(os.open(prints, os.O_WRONLY | os.O_CREAT), 2)
    store, work = torch.distributed.HashStore(), Stuck(torch.device("cpu"))
    if has_failed:
        other = Heartbeat(store, 1, 2, DeviceWork(work.device), timeout_s, bytes, interval_s=0.1)
        other.announce_failure()
    Heartbeat(store, 0, 2, work, timeout_s, lambda: b"all of them", interval_s=0.1)
    time.sleep(1000)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_signal_ends_a_wait_for_the_device_only_if_a_rank_was_killed(is_killed: bool) -> None:
    """torchrun sends SIGTERM to the other ranks when one dies, as a cluster does to all of them.

    Without a rank that was killed, the run has long steps, and saves at the end of this one.
    """
    process = FORKSERVER.Process(target=_wait_in_c, args=(is_killed,))
    process.start()
    process.join(60)
    assert process.exitcode == (1 if is_killed else 75)


def _wait_in_c(is_killed: bool) -> None:
    """Send SIGTERM to this process, whose main thread waits where Python handles no signals, as in CUDA."""
    store, work = torch.distributed.HashStore(), Stuck(torch.device("cpu"))
    other = Heartbeat(store, 1, 2, DeviceWork(work.device), 1e9, bytes, interval_s=0.1)
    while not store.check(["place1"]):
        time.sleep(0.01)
    if is_killed:
        other.stop()
    preemption.listen()
    Heartbeat(store, 0, 2, work, 1e9, bytes, preemption.has_arrived, interval_s=0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    # A minute, or for as long as 30 beats last: the wait ends, and with it a step that takes long.
    threading.Thread(target=_end_step, args=(store, work), daemon=True).start()
    store.wait(["end of the step"], timedelta(seconds=60))
    while not preemption.is_requested():
        time.sleep(0.01)
    os._exit(preemption.EXIT_CODE)


def _end_step(store: torch.distributed.Store, work: Stuck) -> None:
    while work.asked < 30:
        time.sleep(0.01)
    store.set("end of the step", "")
