"""Ranks with a bad batch or bad samples; ranks that raise or hang."""

import re
import time

import torch
import torch.distributed as dist

from runtime.distributed import Heartbeat
from tests.faults import POISON, assert_finite, bad_lines, script_with
from tests.helpers import fork, join, run_to_end


def test_a_batch_of_nan_on_one_rank_is_skipped_by_all(options, tmp_path) -> None:
    """test_techniques.py has gradients that overflow on one rank, in shards."""
    script, run = "train_ddp.py", tmp_path / "run"
    folder = script_with(tmp_path / "s", script, f"if (step, rank) == (5, 1): {POISON}")
    codes, prints = run_to_end(script, run, *options, "max_steps=6", folder=folder)
    assert codes == [0, 0], prints
    for rank, text in enumerate(prints):
        [line] = bad_lines(text)
        assert "step 5: " in line
        assert line.startswith("[rank 1] ") == (rank == 1)
        assert line.count(".png") == 4  # its own half of the batch
    assert_finite(run, options, 1)


def test_a_rank_that_raises_shows_its_traceback_once_and_all_end(options, tmp_path) -> None:
    folder = script_with(tmp_path / "s", "train_ddp.py", "assert step < 3 or rank == 0, 'ouch'")
    codes, prints = run_to_end("train_ddp.py", tmp_path / "run", *options, folder=folder)
    assert codes == [1, 1]
    assert prints[1].count("[rank 1] Traceback") == 1
    assert prints[1].count("[rank 1] AssertionError: ouch") == 1
    assert "Traceback" not in prints[0]
    assert prints[0].count("[rank 0] stops, because another rank has:") == 1


def test_a_rank_that_hangs_is_named_with_the_line_where_it_stands(options, tmp_path) -> None:
    script, run = "train_ddp.py", tmp_path / "run"
    folder = script_with(tmp_path / "s", script, "if (step, rank) == (3, 1): time.sleep(1000)")
    overrides = [*options, "global_batch_size=9", "distributed.timeout_s=10"]
    processes, prints = fork(script, run, *overrides, folder=folder, num_ranks=3)
    codes = join([processes[0], processes[2]])
    assert processes[1].is_alive()
    processes[1].kill()  # as torchrun does
    assert codes == [1, 1]
    text = prints[0].read_text() + prints[2].read_text()
    assert "a collective timed out; missing: rank 1. Where each rank stood:" in text
    assert not re.search("missing: rank [02]", text)
    assert re.search(r"rank 1: \d+ s ago at train(_ddp)?.py:\d+ \(.*time.sleep\(1000\)\)", text)
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: \d+ s ago at (train(_ddp)?|group|launch).py", text)


class Stuck(Heartbeat):
    """Heartbeat of a device that is busy with the same work for a second more in each one."""

    asked = 0

    def overdue_s(self) -> float:
        self.asked += 1
        return float(self.asked)


def test_a_rank_whose_device_waits_for_another_one_reports(capsys) -> None:
    """NCCL raises no error in Python, where the main thread waits for the device."""
    store, device = dist.HashStore(), torch.device("cpu")
    other = Heartbeat(store, 1, 2, device, timeout_s=0.0, interval_s=0.1)
    thread = Stuck(store, 0, 2, device, timeout_s=5.0, interval_s=0.1).thread
    end = time.monotonic() + 60.0
    while thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    other.stop()
    text = capsys.readouterr().err
    assert "[rank 0] a collective timed out; missing: rank 1. Where each rank stood:" in text
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: \d+ s ago at test_ranks.py:\d+ \(", text)
