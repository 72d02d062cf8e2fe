"""Ranks that raise or hang."""

from tests.faults import script_with
from tests.helpers import fork, join, run_to_end


def test_a_rank_that_raises_shows_its_traceback_and_all_end(options, tmp_path) -> None:
    folder = script_with(tmp_path / "s", "train_ddp.py", "assert step < 3 or rank == 0, 'ouch'")
    codes, prints = run_to_end("train_ddp.py", tmp_path / "run", *options, folder=folder)
    assert codes == [1, 1]
    assert prints[1].count("[rank 1] Traceback") == 1
    assert prints[1].count("[rank 1] AssertionError: ouch") == 1
    assert "Traceback" not in prints[0]
    assert prints[0].count("[rank 0] stops, because another rank has:") == 1


def test_ranks_that_wait_for_one_that_hangs_end_after_the_timeout(options, tmp_path) -> None:
    script, run = "train_ddp.py", tmp_path / "run"
    folder = script_with(tmp_path / "s", script, "if (step, rank) == (3, 1): time.sleep(1000)")
    overrides = [*options, "global_batch_size=9", "distributed.timeout_s=10"]
    processes, prints = fork(script, run, *overrides, folder=folder, num_ranks=3)
    codes = join([processes[0], processes[2]])
    assert processes[1].is_alive()
    processes[1].kill()  # as torchrun does
    assert codes == [1, 1]
    texts = [prints[rank].read_text() for rank in (0, 2)]
    assert all("stops, because another rank has: " in text for text in texts)
    assert "10000ms" in "".join(texts)
