"""The scripts of plain/ keep what the template promises, and their pieces work alone."""

import inspect
import re
import runpy
import shutil
import signal
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.helpers import REPOSITORY, replace
from tests.processes import join, start, start_process
from tests.results import assert_same

FOLDER = REPOSITORY / "plain"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
ONE, DDP, AMP = SCRIPTS
NUM_STEPS = 24
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
BEGIN = "    signals = remember_signals()\n"
END_OF_STEP = "            step += 1  # "


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two epochs of 12 steps, with samples left over in training and a rank with fewer in both."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        small = {k: v[: 100 if k.startswith("train") else 31] for k, v in arrays.items()}
    np.savez(path, **small)
    return ["--data", str(path), "--epochs=2", "--batch-size=8", "--save-every=5"]


def num_ranks(script: str) -> int:
    return 1 if script == ONE else 2


def after_step(step: int, action: str) -> tuple[str, str]:
    return END_OF_STEP, f"            if step == {step - 1}:\n                {action}\n"


def hang_up_is(disposition: str) -> tuple[str, str]:
    """The disposition of SIGHUP that a script is started with."""
    return BEGIN, f"    signal.signal(signal.SIGHUP, signal.{disposition})\n"


def run(
    script: str, out: Path, *options: str, edits: Any = (), ranks: int | None = None
) -> tuple[list[int | None], str]:
    """Exit codes of all ranks and the prints of rank 0; of each of the edits, the lines are put
    before the text."""
    path = out.with_name(f"{out.name}-{script}")
    shutil.copy(FOLDER / script, path)
    for place, lines in edits:
        replace(path, place, lines + place)
    command = [str(path), *options, f"--out={out}"]
    count = ranks or (None if script == ONE else 2)
    processes, paths = start(command, out.with_suffix(".txt"), count)
    return join(processes), paths[0].read_text()


def checkpoint_of(out: Path) -> dict[str, Any]:
    return torch.load(out / "last.pt")


@pytest.mark.parametrize(
    "script", [ONE, *(pytest.param(s, marks=pytest.mark.slow) for s in (DDP, AMP))]
)
def test_a_run_that_is_stopped_in_any_way_ends_with_the_same_bits(script, options, tmp_path):
    """Killed while it saves and after its last step, and by signals to one rank."""
    if script == AMP:
        options = [*options, "--dtype=float16"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    codes, printed = run(script, whole, *options)
    assert not any(codes), printed
    last_line = printed.splitlines()[-1]

    cut = f'        if state["step"] == 10:\n            file.truncate(999)\n            {KILL}\n'
    codes, printed = run(script, out, *options, edits=[("        torch.save(state, file)\n", cut)])
    assert -signal.SIGKILL in codes, printed
    assert checkpoint_of(out)["step"] == 5

    for number, step in ((signal.SIGTERM, 7), (signal.SIGHUP, 12)):
        last_rank = f'if os.environ.get("RANK") != "0": os.kill(os.getpid(), {number:d})'
        stop = [hang_up_is("SIG_DFL"), after_step(step, last_rank)]
        codes, printed = run(script, out, *options, edits=stop)
        assert codes == [75] * num_ranks(script), printed
        assert checkpoint_of(out)["step"] == step
    assert "epoch 1" not in printed  # left out by the signal after its last step

    # What the result depends on must not change, what it does not depend on may.
    before = (out / "last.pt").read_bytes()
    codes, printed = run(script, out, *options, "--lr=0.5", "--epochs=3")
    assert codes == [1] * num_ranks(script), printed
    assert re.search(r"last\.pt has .*'epochs', 3\b.*'lr', 0\.5\b", printed), printed
    assert (out / "last.pt").read_bytes() == before
    kill = [after_step(NUM_STEPS, KILL)]
    codes, printed = run(script, out, *options, "--save-every=7", edits=kill)
    assert -signal.SIGKILL in codes, printed
    assert f"resumed from {out / 'last.pt'}: step 12 of {NUM_STEPS}" in printed
    assert "epoch 1" in printed

    codes, printed = run(script, out, *options)
    assert not any(codes), printed
    assert printed.splitlines()[-1] == last_line
    states = checkpoint_of(out), checkpoint_of(whole)
    assert states[0].pop("args") == states[1].pop("args")
    assert_same(*states)


def test_weights_that_are_not_finite_are_not_saved_and_nohup_is_respected(options, tmp_path):
    out, spoil = tmp_path / "run", 'next(model.parameters()).data.fill_(float("nan"))'
    hang_up = "elif step == 5: os.kill(os.getpid(), signal.SIGHUP)"
    place, lines = after_step(10, spoil)
    edits = [hang_up_is("SIG_IGN"), (place, f"{lines}            {hang_up}\n")]
    codes, printed = run(ONE, out, *options, edits=edits)
    assert codes == [1]
    assert "not finite after step 10" in printed
    assert str(out / "last.pt") in printed
    assert checkpoint_of(out)["step"] == 5


def test_two_ranks_compute_what_one_process_computes(options, tmp_path) -> None:
    """Without dropout, and without BatchNorm: on a CPU it looks at the share of a rank. In float64,
    as AdamW magnifies the rounding of float32 in weights with small gradients."""
    alike = "    import functools\n    torch.set_default_dtype(torch.float64)\n"
    alike += "    nn.BatchNorm2d = functools.partial(nn.GroupNorm, 4)\n"
    alike += "    nn.Dropout = nn.Identity\n"
    results = []
    for script in (ONE, DDP):
        codes, text = run(script, tmp_path / script, *options, edits=[(BEGIN, alike)])
        assert not any(codes), text
        results.append((text.splitlines()[-1], checkpoint_of(tmp_path / script)["model"]))
    (line, weights), (other_line, other_weights) = results
    assert line == other_line
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=1e-9)


def test_a_cpu_without_bfloat16_computes_in_float32(options, tmp_path) -> None:
    old = [(BEGIN, '    torch.cpu.get_capabilities = lambda: {"avx512_bf16": False}\n')]
    for name, more in (("default", []), ("given", ["--dtype=float32"])):
        codes, text = run(AMP, tmp_path / name, *options, "--epochs=1", *more, edits=old, ranks=1)
        assert codes == [0], text
    assert_same(*(checkpoint_of(tmp_path / name)["model"] for name in ("default", "given")))


def test_a_run_goes_on_with_another_number_of_ranks(options, tmp_path) -> None:
    out = tmp_path / "run"
    stop = [after_step(7, "os.kill(os.getpid(), signal.SIGTERM)")]
    assert run(DDP, out, *options, edits=stop)[0] == [75, 75]
    assert run(ONE, out, *options)[0] == [0]
    assert checkpoint_of(out)["step"] == NUM_STEPS


# The pieces that docs/plain.md offers.


def piece(name: str) -> Any:
    """A function of the script with DDP, which sees the imports of its file and nothing else."""
    names = runpy.run_path(str(FOLDER / DDP))
    imports = {n: x for n, x in names.items() if getattr(x, "__module__", "") != "<run_path>"}
    return FunctionType(inspect.unwrap(names[name]).__code__, imports)


def use_pieces(rank: int, folder: Path) -> None:
    place = f"file://{folder / 'place'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    assert piece("remember_signals")() == []
    batches = piece("batches_of")(epoch=3, seed=1, num_samples=26, batch_size=4)
    assert len(set(torch.cat(batches).tolist())) == 24
    piece("save")({"step": 1}, folder / str(rank) / "last.pt")
    model = nn.BatchNorm1d(3, affine=False, eps=0)
    assert model.running_mean is not None
    model.running_mean.fill_(float(rank))
    inputs, labels = torch.arange(21.0).sin().view(7, 3), torch.arange(7) % 3
    found = piece("evaluate")(model, TensorDataset(inputs, labels), torch.device("cpu"))
    accuracy = (inputs.argmax(1) == labels).double().mean()
    # With the statistics of rank 0, by which the model changes nothing.
    assert found == pytest.approx([float(cross_entropy(inputs, labels)), float(accuracy)])
    dist.destroy_process_group()


def test_pieces_need_the_imports_of_their_file_and_nothing_else(tmp_path) -> None:
    assert join([start_process(use_pieces, rank, tmp_path) for rank in (0, 1)]) == [0, 0]
