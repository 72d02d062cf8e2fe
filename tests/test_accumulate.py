"""`accumulate_steps=auto`: the fewest micro-batches that fit, found without a trace."""

import re
from unittest.mock import Mock, patch

import pytest
import torch

from runtime import build_optimizer
from runtime.accumulate import MicroBatches
from runtime.process_group import ProcessGroup
from runtime.progress import Progress
from tests.helpers import make_config
from tests.processes import train
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


def capped(lines: str) -> list[tuple[str, str]]:
    """Edits of a script whose last rank runs out of memory."""
    return [("    # your own: loggers, callbacks\n", CAP.format(lines=lines))]


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
    number, edits = 8 // num_ranks, capped(lines)
    options = [*OPTIONS, "amp.dtype=float16", "epoch_steps=2"]
    auto, given = tmp_path / "auto", tmp_path / "given"
    text = train(script, auto, *options, AUTO, edits=edits)
    train(script, given, *options, f"accumulate_steps={number}", edits=edits)
    assert text.count(f"accumulate_steps=auto: {number} parts with 8 of") == 1
    assert f"accumulate_steps={number // 2} does not fit on rank {num_ranks - 1}" in text
    assert_same_state(auto, given)
    assert values_of(auto, "train/loss") == values_of(given, "train/loss")


@pytest.mark.slow
def test_a_resume_has_the_number_of_its_checkpoint_on_as_many_ranks_alone(tmp_path) -> None:
    script, run = "train_ddp_accumulate.py", tmp_path / "run"
    for num_ranks, max_steps, numbers in [(2, 2, ["4"]), (2, 4, []), (1, 6, ["8"])]:
        options = [*OPTIONS, AUTO, "resume=auto", f"max_steps={max_steps}"]
        text = train(script, run, *options, edits=capped(FORWARD), num_ranks=num_ranks)
        assert re.findall(r"=auto: (\d+) parts", text) == numbers


ODD = ["model.kwargs.batch_norm=false", "global_batch_size=67"]
KEYS = ["(train.py:", AUTO, "train_recompute.py", "train_amp.py"]
KEYS += ["train_fsdp.py and a smaller global_batch_size"]


@pytest.mark.parametrize(
    ("script", "options", "most", "code", "shown"),
    [
        ("train_accumulate.py", [AUTO, *ODD], 8, 0, ["global_batch_size=67"]),
        ("train_accumulate.py", [AUTO, *ODD], 0, 2, ["accumulate_margin=0.1"]),
        ("train_fsdp_accumulate.py", [AUTO], 8, 2, [f"{AUTO} does not work with FSDP; give a"]),
        ("train.py", [], 8, 2, KEYS),  # without memory
    ],
)
def test_a_batch_with_few_divisors_and_what_does_not_fit_are_told(
    script: str, options: list[str], most: int, code: int, shown: list[str], tmp_path
) -> None:
    edits = capped(FORWARD.replace("> 8", f"> {most}"))
    text = train(script, tmp_path / "run", *OPTIONS, *options, edits=edits, code=code)
    assert "Traceback" not in text
    assert all(words in (text.splitlines()[-1] if code else text) for words in shown), text


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
