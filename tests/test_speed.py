"""Which rank the others wait for, by the time that each needs for its own part of the steps."""

import socket

from tests.helpers import folder_with, replace, run_to_end, scalars_of, summary_of

SLOW = """
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    model.register_forward_pre_hook(lambda *_: spend(0.5))
    if group.rank == 1:
        model.register_forward_pre_hook(lambda *_: spend(0.5))
"""
WAIT = """
            if group.rank == 0:
                spend(0.5)
"""


def test_a_slow_rank_is_named_with_its_host(tmp_path) -> None:
    """By a clock that only the script sets, since all ranks sleep on busy CPUs: rank 0 waits for
    the slow one after backward."""
    folder, run = folder_with(tmp_path / "s", "train_ddp.py"), tmp_path / "run"
    edits = {
        "    # state: what a checkpoint holds\n": SLOW,
        "            # clip\n": WAIT,
        "        group=group,\n": "        clock=lambda: now[0],\n",
    }
    for place, added in edits.items():
        replace(folder / "train_ddp.py", place, f"{added}{place}")
    options = ["loader=synthetic", "global_batch_size=400", "data.crop=[12,12]", "log.images=0"]
    options += ["log.every_steps=5", "max_steps=11"]
    codes, texts = run_to_end("train_ddp.py", run, *options, folder=folder)
    assert codes == [0, 0], texts
    summary = summary_of(run)
    expected = {"rank": 1, "host": socket.gethostname(), "slower_by": 1.0}
    assert (summary["slowest_rank"], summary["perf/slowest_rank"]) == (expected, 1)
    assert scalars_of(run, "perf/slowest_rank") == [(5, 1), (10, 1), (11, 1)]
    assert f"rank 1 on {expected['host']}" in texts[0].splitlines()[-3]
