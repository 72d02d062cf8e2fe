"""`accumulate_steps=auto`: the fewest micro-batches that fit, found without a trace."""

from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from runtime import build_optimizer
from runtime.accumulate import MicroBatches
from runtime.process_group import ProcessGroup
from runtime.progress import Progress
from tests.faults import script_with
from tests.helpers import folder_with, make_config
from tests.processes import run_to_end, train
from tests.results import assert_same_state, values_of

OPTIONS = ["loader=synthetic", "model.kwargs.width=2", "data.crop=[8,8]", "global_batch_size=64"]
OPTIONS += ["log.images=0", "log.every_steps=1", "optimizer=adamw", "optimizer.warmup_epochs=0"]
OPTIONS += ["max_steps=3", "epochs=1"]
AUTO = "accumulate_steps=auto"

CAP = """
    import torch as pt

    noise = pt.nn.Dropout(0.2)

    def noisy(module, inputs, outputs):
        {lines}
        return noise(outputs)

    inner = model.module if hasattr(model, "module") else model
    [*inner.children()][-1].register_forward_hook(noisy)
    is_capped = run.group.rank == run.group.world_size - 1
"""
"""A last layer whose outputs depend on random numbers."""

FULL = "pt.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')"
FORWARD = f"""if is_capped and module.training and len(outputs) > 8:
            raise {FULL}"""
BACKWARD = f"""def full(grad):
            raise {FULL}
        if is_capped and module.training and len(outputs) > 8:
            outputs.register_hook(full)"""


def capped(folder: Path, script: str, lines: str) -> Path:
    """A folder with a script whose last rank runs out of memory."""
    place = "    # your own: loggers, callbacks\n"
    return folder_with(folder / "s", script, (place, CAP.format(lines=lines)))


@pytest.mark.parametrize(
    ("num_ranks", "script", "lines"),
    [
        (1, "train_accumulate_amp_ema.py", FORWARD),
        (2, "train_ddp_accumulate.py", BACKWARD),
    ],
)
def test_what_was_tried_leaves_no_trace_in_the_run(num_ranks, script, lines, tmp_path) -> None:
    """Its bits are those of the number given by hand, in two epochs; one of two ranks lacks the
    memory."""
    number, folder = 8 // num_ranks, capped(tmp_path, script, lines)
    options = [*OPTIONS, "amp.dtype=float16", "epoch_steps=2"]
    auto, given = tmp_path / "auto", tmp_path / "given"
    text = train(script, auto, *options, AUTO, folder=folder)
    train(script, given, *options, f"accumulate_steps={number}", folder=folder)
    assert text.count(f"accumulate_steps=auto: {number} parts with 8 of") == 1
    assert f"accumulate_steps={number // 2} does not fit on rank {num_ranks - 1}" in text
    assert_same_state(auto, given)
    assert values_of(auto, "train/loss") == values_of(given, "train/loss")


def test_a_resume_has_the_number_of_its_checkpoint_on_as_many_ranks_alone(tmp_path) -> None:
    script, run = "train_ddp_accumulate.py", tmp_path / "run"
    folder = capped(tmp_path, script, FORWARD)
    for num_ranks, max_steps, number in [(2, 2, 4), (2, 4, 0), (1, 6, 8)]:
        options = [*OPTIONS, AUTO, "resume=auto", f"max_steps={max_steps}"]
        codes, texts = run_to_end(script, run, *options, folder=folder, num_ranks=num_ranks)
        assert not any(codes), texts
        found = [line for line in texts[0].splitlines() if AUTO in line and "parts" in line]
        assert [line.split("=auto: ")[1].split()[0] for line in found] == [str(number)] * (
            number > 0
        )


def test_a_batch_of_one_part_is_not_cut() -> None:
    """Its values may have different first dimensions, as the boxes of several images have."""
    run = Mock(cfg=make_config("accumulate_steps=1"), progress=Progress(), group=ProcessGroup())
    batch = torch.zeros(4, 3), torch.zeros(11, 4)
    [whole] = MicroBatches(run, torch.nn.Linear(1, 1), Mock()).of([batch])
    assert whole is batch


@pytest.mark.parametrize(
    ("most", "code", "shown"), [(8, 0, "global_batch_size=67"), (0, 2, "accumulate_margin=0.1")]
)
def test_a_batch_with_few_divisors_and_one_that_does_not_fit_are_named(
    most: int, code: int, shown: str, tmp_path
) -> None:
    options = [*OPTIONS, AUTO, "model.kwargs.batch_norm=false", "global_batch_size=67"]
    folder = capped(tmp_path, script := "train_accumulate.py", FORWARD.replace("> 8", f"> {most}"))
    assert shown in train(script, tmp_path / "run", *options, folder=folder, code=code)


def test_with_fsdp_a_number_is_asked_for(tmp_path) -> None:
    script = "train_fsdp_accumulate.py"
    folder = folder_with(tmp_path / "s", script)
    text = train(script, tmp_path / "run", *OPTIONS, AUTO, folder=folder, code=2)
    assert "accumulate_steps=auto does not work with FSDP; give a number" in text


@pytest.mark.parametrize(("optimizer", "missing"), [("adamw", 4 * 1010), ("sgd", 0)])
def test_room_is_left_for_what_the_optimizer_will_hold(optimizer: str, missing: int) -> None:
    """AdamW has two numbers for each of 1,010 weights, one of which is in place of the copy's
    weights; of SGD, the momentum is there already."""
    cfg = make_config(AUTO, "loader=synthetic", f"optimizer={optimizer}", "global_batch_size=8")
    model = torch.nn.Linear(100, 10)
    run = Mock(cfg=cfg, device=torch.device("cpu"), precision=torch.float32)
    run.state = {"optimizer": build_optimizer(cfg, model, 10)[0]}
    run.progress, run.group = Progress(), ProcessGroup()
    parts = MicroBatches(run, model, Mock(loss=torch.nn.functional.cross_entropy))
    batch = torch.ones(8, 100), torch.zeros(8, dtype=torch.long)
    with patch.object(torch, "empty", wraps=torch.empty) as reserved:
        assert [*parts.of([batch])] == [batch]
    assert reserved.call_args.args == (missing,)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_without_memory_names_the_place_and_the_keys_that_help(tmp_path) -> None:
    folder = script_with(tmp_path / "s", "train.py", "if step == 3: torch.empty(1 << 50)")
    text = train("train.py", tmp_path / "run", *OPTIONS, folder=folder, code=2)
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    for shown in ("(train.py:", "accumulate_steps=auto", "train_recompute.py", "train_amp.py"):
        assert shown in last
    assert "train_fsdp.py and a smaller global_batch_size" in last
