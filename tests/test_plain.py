"""The scripts of plain/ keep what the template promises, and their pieces work alone."""

import ast
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.helpers import REPOSITORY, replace
from tests.processes import cpu_with, join, signal_handlers_restored, start, start_process
from tests.results import assert_same

FOLDER = REPOSITORY / "plain"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
ONE, DDP, AMP = SCRIPTS
NUM_STEPS = 24
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two epochs of 12 steps, with samples left over in training and a rank with fewer in both."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        small = {k: v[: 100 if k.startswith("train") else 31] for k, v in arrays.items()}
    np.savez(path, **small)
    return ["--data", str(path), "--epochs=2", "--batch-size=8", "--save-every=5"]


def num_ranks(script: str) -> int:
    return 1 if script.endswith(ONE) else 2


def edited(script: str, folder: Path, *edits: tuple[str, str]) -> str:
    """A copy of a script with these texts replaced."""
    path = folder / f"{len(list(folder.iterdir()))}_{script}"
    shutil.copy(FOLDER / script, path)
    for edit in edits:
        replace(path, *edit)
    return str(path)


def after_step(step: int, action: str) -> tuple[str, str]:
    counting = "            step += 1  # "
    return counting, f"            if step == {step - 1}:\n                {action}\n{counting}"


def after_step_of_last_rank(step: int, number: signal.Signals) -> tuple[str, str]:
    return after_step(step, f'if os.environ.get("RANK") != "0": os.kill(os.getpid(), {number:d})')


def hang_up_is(disposition: str) -> tuple[str, str]:
    """The disposition of SIGHUP that the script is started with."""
    start = "    signals = remember_signals()\n"
    return start, f"    signal.signal(signal.SIGHUP, signal.{disposition})\n{start}"


def run(
    script: str, out: Path, *options: str, ranks: int | None = None
) -> tuple[list[int | None], str]:
    """Exit codes of all ranks and the prints of rank 0."""
    command = [script, *options, f"--out={out}"]
    ranks = ranks or num_ranks(script)
    prints = out.with_name(f"prints-{out.name}")
    processes, paths = start(command, prints, ranks if ranks > 1 else None)
    return join(processes), paths[0].read_text()


def checkpoint_of(out: Path) -> dict[str, Any]:
    return torch.load(out / "last.pt")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_is_stopped_in_any_way_ends_with_the_same_bits(script, options, tmp_path):
    """Killed while it saves and after its last step, and by signals to one rank."""
    if script == AMP:
        options = [*options, "--dtype=float16"]
    command, whole, out = f"plain/{script}", tmp_path / "whole", tmp_path / "run"
    codes, printed = run(command, whole, *options)
    assert not any(codes), printed
    last_line = printed.splitlines()[-1]

    saved = "        torch.save(state, file)\n"
    cut = f'if state["step"] == 10:\n            file.truncate(999)\n            {KILL}\n'
    codes, printed = run(edited(script, tmp_path, (saved, f"{saved}        {cut}")), out, *options)
    assert -signal.SIGKILL in codes, printed
    assert checkpoint_of(out)["step"] == 5

    for number, step in ((signal.SIGTERM, 7), (signal.SIGHUP, 12)):
        stop = hang_up_is("SIG_DFL"), after_step_of_last_rank(step, number)
        codes, printed = run(edited(script, tmp_path, *stop), out, *options)
        assert codes == [75] * num_ranks(script), printed
        assert checkpoint_of(out)["step"] == step
    assert "epoch 1" not in printed  # left out by the signal after its last step

    # What the result depends on must not change, what it does not depend on may.
    before = (out / "last.pt").read_bytes()
    codes, printed = run(command, out, *options, "--lr=0.5", "--epochs=3")
    assert codes == [1] * num_ranks(script), printed
    assert re.search(r"last\.pt has .*'epochs', 3\b.*'lr', 0\.5\b", printed), printed
    assert (out / "last.pt").read_bytes() == before
    kill = after_step(NUM_STEPS, KILL)
    codes, printed = run(edited(script, tmp_path, kill), out, *options, "--save-every=7")
    assert -signal.SIGKILL in codes, printed
    assert f"resumed from {out / 'last.pt'}: step 12 of {NUM_STEPS}" in printed
    assert "epoch 1" in printed

    codes, printed = run(command, out, *options)
    assert not any(codes), printed
    assert printed.splitlines()[-1] == last_line
    states = checkpoint_of(out), checkpoint_of(whole)
    assert states[0].pop("args") == states[1].pop("args")
    assert_same(*states)


def test_weights_that_are_not_finite_are_not_saved_and_nohup_is_respected(options, tmp_path):
    out = tmp_path / "run"
    closed = after_step(6, "os.kill(os.getpid(), signal.SIGHUP)")
    ignoring = edited(ONE, tmp_path, hang_up_is("SIG_IGN"), closed)
    replace(Path(ignoring), *after_step(9, 'next(model.parameters()).data.fill_(float("nan"))'))
    codes, printed = run(ignoring, out, *options)
    assert codes == [1]
    assert "not finite after step 10" in printed
    assert str(out / "last.pt") in printed
    assert checkpoint_of(out)["step"] == 5


def test_two_ranks_compute_what_one_process_computes(options, tmp_path) -> None:
    """Without dropout, and without BatchNorm: on a CPU it looks at the share of a rank. In float64,
    as AdamW magnifies the rounding of float32 in weights with small gradients."""
    edits = [
        ("nn.BatchNorm2d(num_out)", "nn.GroupNorm(4, num_out)"),
        ("Dropout(0.1)", "Dropout(0)"),
        ("signals = ", "torch.set_default_dtype(torch.float64)\n    signals = "),
    ]
    printed, weights = [], []
    for script in (ONE, DDP):
        out = tmp_path / script
        codes, text = run(edited(script, tmp_path, *edits), out, *options)
        assert not any(codes), text
        printed.append(text.splitlines()[-1])
        weights.append(checkpoint_of(out)["model"])
    assert printed[0] == printed[1]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-9)


def test_a_cpu_without_bfloat16_computes_in_float32(options, tmp_path) -> None:
    weights = []
    for name, more in (("default", []), ("given", ["--dtype=float32"])):
        command = [f"plain/{AMP}", *options, "--epochs=1", *more, f"--out={tmp_path / name}"]
        watch = partial(cpu_with, {"avx512_bf16": False})
        processes, [prints] = start(command, tmp_path / f"{name}-", 1, REPOSITORY, watch)
        assert join(processes) == [0], prints.read_text()
        weights.append(checkpoint_of(tmp_path / name)["model"])
    assert_same(*weights)


def test_a_run_goes_on_with_another_number_of_ranks(options, tmp_path) -> None:
    out = tmp_path / "run"
    stop = after_step(7, "os.kill(os.getpid(), signal.SIGTERM)")
    assert run(edited(DDP, tmp_path, stop), out, *options)[0] == [75, 75]
    assert run("plain/train.py", out, *options, ranks=1)[0] == [0]
    assert checkpoint_of(out)["step"] == NUM_STEPS


# The pieces that docs/plain.md offers, each without the rest of its script.


def piece(name: str) -> Any:
    """A function of the script with DDP, with the imports of its file and nothing else."""
    text = (FOLDER / DDP).read_text()
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([*imports, *functions], []), DDP, "exec"), names)
    return names[name]


def test_pieces_sampler_atomic_saving_and_preemption(tmp_path) -> None:
    batches = piece("batches_of")(epoch=3, seed=1, num_samples=26, batch_size=4)
    samples = torch.cat(batches).tolist()
    assert len(set(samples)) == len(samples) == 24
    assert set(samples) < set(range(26))

    save, path = piece("save"), tmp_path / "new" / "last.pt"
    save({"step": 1}, path)
    with pytest.raises(AttributeError, match="pickle"):
        save({"step": 2, "f": lambda: 0}, path)
    assert torch.load(path) == {"step": 1}

    with signal_handlers_restored():
        received = piece("remember_signals")()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGTERM, signal.SIGUSR1]


def evaluate_in_ranks(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    model = nn.BatchNorm1d(3, affine=False, eps=0)
    assert model.running_mean is not None
    model.running_mean.fill_(float(rank))
    inputs, labels = torch.arange(21.0).sin().view(7, 3), torch.arange(7) % 3
    found = piece("evaluate")(model, TensorDataset(inputs, labels), torch.device("cpu"))
    accuracy = (inputs.argmax(1) == labels).double().mean()
    # With the statistics of rank 0, by which the model changes nothing.
    assert found == pytest.approx([float(cross_entropy(inputs, labels)), float(accuracy)])
    dist.destroy_process_group()


def test_pieces_buffers_and_sums_of_metrics_on_two_ranks(tmp_path) -> None:
    place = f"file://{tmp_path / 'place'}"
    assert join([start_process(evaluate_in_ranks, rank, place) for rank in (0, 1)]) == [0, 0]
