"""`tools.compare` names the phase, module and size of the first difference of two scripts."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.helpers import folder_with, has_ranks, replace
from tests.images import small_digits
from tests.processes import execute, train
from tools.compare import PHASES, Computed, first_difference

Edits = tuple[tuple[str, str], ...]
PLAIN = "model.kwargs.batch_norm=false"
HALF = "amp.dtype=float16"
BFLOAT16 = "amp.dtype=bfloat16"
BUILD = "    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)\n"
DROPPED = "torch.nn.Sequential(torch.nn.Dropout(), model.classifier)"
DROPOUT = {BUILD: f"{BUILD}    model.classifier = {DROPPED}\n"}


def before_optimizer(line: str) -> dict[str, str]:
    """An edit of a script that puts a line before its optimizer."""
    place = "    # optimizer\n"
    return {place: f"    {line}\n{place}"}


EDITS = {
    "batch_norm": {},
    "buffers": {"        sync_buffers(state)\n": ""},
    "dropout": {**DROPOUT, "seed_everything(cfg.seed, group.rank)": "seed_everything(cfg.seed)"},
    "sum": {"task.loss(outputs, targets)": "task.loss_per_image(outputs, targets).sum()"},
    "frozen": before_optimizer("model.features[2].requires_grad_(False)"),
    "same": {"device, group.rank, group.world_size)": "device)"},
    "set_epoch": {"        train_loader.set_epoch(epoch)\n": ""},
    "unscale": {"            scaler.unscale_(optimizer)\n": ""},
    "rate": before_optimizer("cfg.optimizer.lr *= group.world_size"),
    "metrics": {"        dist.all_reduce(totals)\n": ""},
    "no_eval": before_optimizer("model.eval = model.train"),
}
"""Mistakes in a script."""
TOLD = """
batch_norm | train_ddp.py, train.py | step 1, output of features.0.1 |
buffers | train_ddp.py, train_ddp.py | step 2, evaluated weight features.0.1.running_mean |
dropout | train_ddp.py, train.py | step 1, seed of dropout | seed_everything
sum | train_ddp.py, train.py | step 1, train/loss |
frozen | train_ddp.py, train.py | step 1, gradient before averaging features.2.0.weight by inf, |
same | train_ddp.py, train.py | step 1, samples |
set_epoch | train_ddp.py, train.py | step 4, evaluated samples |
unscale | train_ddp_amp.py, train_amp.py | step 1, train/grad_norm |
rate | train_ddp.py, train.py | step 1, learning rate by 0.5, | optimizer.lr
metrics | train_ddp.py, train.py | step 2, val/loss | dist.all_reduce(totals)
no_eval | train.py, train.py | step 2, evaluated mode | model.eval()
"""
"""Of each mistake: its script, the one without it, and texts of the difference and its cause, if
one phrase says it."""
MORE = {"batch_norm": [], "buffers": [], "unscale": [PLAIN, HALF]}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Four steps in each epoch."""
    return [*small_digits(tmp_path_factory), "global_batch_size=16"]


@pytest.fixture(scope="module")
def compute(data, tmp_path_factory) -> Callable[..., Computed]:
    """What a script computes after some edits, recorded in forked processes."""

    @cache
    def compute(script: str, overrides: tuple[str, ...], edits: Edits, steps: int) -> Computed:
        folder = tmp_path_factory.mktemp("run")
        folder_with(folder / "s", script)
        for old, new in edits:
            replace(folder / "s" / script, old, new)
        command = ["-m", "tools.compare", "record", str(folder / "run"), script, *data]
        command += [f"max_steps={steps}", *overrides]
        execute(command, folder / "prints", 1 + has_ranks(script), folder / "s")
        return Computed(script, folder / "run")

    return compute


@pytest.mark.parametrize(
    ("mistake", "scripts", "what", "cause"),
    [[cell.strip() for cell in line.split(" |")] for line in TOLD.strip().splitlines()],
    ids=EDITS,
)
def test_a_mistake_is_named(mistake: str, scripts: str, what: str, cause: str, compute) -> None:
    script, other = scripts.split(", ")
    edits = EDITS[mistake].items()
    steps = 5 if mistake == "set_epoch" else 2
    options = (*MORE.get(mistake, [PLAIN]), "clip_grad_norm=0.1")
    one = compute(other, options, tuple(edits & DROPOUT.items()), steps)
    two = compute(script, options, tuple(edits), steps)
    difference, largest = first_difference(one, two)
    assert what in difference.replace("\n", " ")
    assert cause in difference.partition("likely cause: ")[2]
    assert bool(cause) == ("likely cause" in difference)
    assert largest < 1e-6 or HALF in options


@pytest.mark.parametrize(
    ("script", "more", "rounding"),
    [
        ("train_dp.py", (), 1e-12),
        ("train_recompute.py", (), 1e-12),
        ("train_fsdp.py", (), 1e-6),
        ("train_ddp_accumulate.py", ("accumulate_steps=4",), 1e-6),
        ("train_ddp_ema.py", (), 1e-6),
        ("train_amp.py", (HALF,), 0.1),
        ("train_ddp_amp.py", (BFLOAT16,), 0.3),
    ],
)
def test_scripts_without_mistakes_are_equal(script: str, more, rounding: float, compute) -> None:
    """With dropout, too."""
    edits = tuple(DROPOUT.items())
    one = compute("train.py", (PLAIN,), edits, 3)
    difference, largest = first_difference(one, compute(script, (PLAIN, *more), edits, 3))
    assert difference == ""
    assert largest < rounding
    assert max(step for step, *_ in one.values) == 2
    assert {phase for _, phase, _ in one.values} >= {*PHASES}


@pytest.mark.slow
def test_two_scripts_are_compared_and_two_runs(data, tmp_path) -> None:
    """By the command line, whose scripts are processes of their own."""
    folder = folder_with(tmp_path / "s", "train.py")
    mine = (folder / "train.py").read_text().replace("scheduler.step()", "pass")
    (folder / "mine.py").write_text(mine)
    runs = [f"run={tmp_path / name}" for name in ("a", "b")]
    options = [*data, "max_steps=2", "log.every_steps=1"]
    train("train.py", tmp_path / "a", *options, folder=folder)
    train("mine.py", tmp_path / "b", *options, "optimizer.weight_decay=0.5", folder=folder)
    of_runs = ["+  weight_decay: 0.5", '+  "script": "mine.py"', "step 2 on: train/"]
    of_scripts = ["step 2, learning rate", "scheduler.step() at another place"]
    for arguments, code, shown in [
        (["train.py", "mine.py", "steps=2", *data], 1, of_scripts),
        (runs, 1, of_runs),
        ([runs[0], runs[0]], 0, ["equal to 1e-6"]),
        (["train.py"], 2, ["two scripts"]),
    ]:
        command = ["-m", "tools.compare", *arguments]
        text = execute(command, tmp_path / "prints", folder=folder, code=code)
        assert all(words in text for words in shown), text
