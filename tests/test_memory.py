"""A run that is out of memory says what fills it and what would help."""

import pytest
import torch

from conf.cli import explain
from runtime.memory import is_out_of_memory
from tests.faults import script_with
from tests.helpers import REPOSITORY, has_ranks, run_to_end
from tests.parts import rows_of

OPTIONS = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "data.resize=8"]
OPTIONS += ["global_batch_size=64", "log.images=0", "optimizer=adamw", "max_steps=4", "epochs=1"]


@pytest.mark.parametrize(
    ("script", "line", "shown"),
    [
        ("train.py", "torch.empty(1 << 50)", "DefaultCPUAllocator"),
        *rows_of("OUT_OF_MEMORY"),
    ],
)
def test_the_last_lines_name_the_place_what_is_held_and_the_keys(
    script, line, shown, tmp_path
) -> None:
    rank = int(has_ranks(script))
    lines = [f"if (step, rank) == (3, {rank}):", f"    {line}"]
    folder = script_with(tmp_path / "s", script, *lines)
    codes, texts = run_to_end(script, tmp_path / "run", *OPTIONS, folder=folder)
    assert codes[rank] == 2, texts
    assert "Traceback" not in texts[rank]
    place, held, helps = texts[rank].splitlines()[-3:]
    assert f"({script}:" in place
    assert shown in place
    assert all(name in held for name in (f"rank {rank}", "weights", "optimizer", "activations"))
    for other in ("train_accumulate.py", "train_recompute.py", "train_fsdp.py"):
        assert (other in helps) == (REPOSITORY / other).exists()
    assert "global_batch_size" in helps


def test_errors_of_memory_are_told_from_others() -> None:
    assert "ulimit -v" in str(explain(RuntimeError("can't start new thread")))
    for error in (
        torch.OutOfMemoryError(),
        MemoryError(),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid"))
