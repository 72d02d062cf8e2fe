"""The scripts of plain/ keep what the template promises, and their pieces work alone."""

import ast
import json
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.helpers import (
    REPOSITORY,
    cpu_with,
    free_port,
    join,
    replace,
    run_all,
    signal_handlers_restored,
    start,
    start_process,
    summary_of,
)
from tests.test_architecture import rows_of

FOLDER = REPOSITORY / "plain"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
ONE, DDP, AMP = SCRIPTS
NUM_STEPS = 24
STEPPED = "            step += 1  # "
PAGE = (REPOSITORY / "docs" / "plain.md").read_text()


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
    return STEPPED, f"            if step == {step - 1}:\n                {action}\n{STEPPED}"


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


def assert_same(one: Path, other: Path) -> None:
    first, second = checkpoint_of(one), checkpoint_of(other)
    assert first.pop("args") == second.pop("args")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(
    request: pytest.FixtureRequest, options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[str], Path, str]:
    """A script, options, the folder and prints of its run that nothing stops."""
    script, out = request.param, tmp_path_factory.mktemp("whole") / "run"
    more = ["--dtype=float16"] if script == AMP else []
    codes, printed = run(f"plain/{script}", out, *options, *more)
    assert not any(codes), printed
    assert checkpoint_of(out)["step"] == NUM_STEPS
    return script, [*options, *more], out, printed.splitlines()[-1]


def test_a_run_that_is_killed_at_any_step_and_started_again_ends_with_the_same_bits(
    whole, tmp_path
) -> None:
    """Also while it saves, which leaves the checkpoint before."""
    script, options, expected, last_line = whole
    out, saved = tmp_path / "run", "        torch.save(state, file)\n"
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    cut = f'if state["step"] == 10:\n            file.truncate(999)\n            {kill}\n'
    # Before the first checkpoint, while the second is written, and then in mid-epoch, with the
    # first epoch, and with the last.
    edits = [after_step(3, kill), (saved, f"{saved}        {cut}")]
    edits += [after_step(step, kill) for step in (8, 12, 13, NUM_STEPS)]
    for edit in edits:
        codes, printed = run(edited(script, tmp_path, edit), out, *options)
        assert -signal.SIGKILL in codes, printed
        assert edit[0] != saved or checkpoint_of(out)["step"] == 5
    codes, printed = run(f"plain/{script}", out, *options)
    assert not any(codes), printed
    assert printed.splitlines()[-1] == last_line
    assert_same(out, expected)


def test_a_signal_to_one_rank_saves_after_the_step_and_ends_all(whole, tmp_path) -> None:
    script, options, expected, last_line = whole
    out = tmp_path / "run"
    for number, step in ((signal.SIGTERM, 7), (signal.SIGUSR1, 12), (signal.SIGHUP, 17)):
        action = f'if os.environ.get("RANK") != "0": os.kill(os.getpid(), {number:d})'
        stop = edited(script, tmp_path, hang_up_is("SIG_DFL"), after_step(step, action))
        codes, printed = run(stop, out, *options)
        assert codes == [75] * num_ranks(script), printed
        assert checkpoint_of(out)["step"] == step
        assert ("epoch 1" in printed) == (step == 17)  # left out by the signal after its last step
    codes, printed = run(f"plain/{script}", out, *options)
    assert not any(codes), printed
    assert printed.splitlines()[-1] == last_line
    assert_same(out, expected)


def test_other_settings_are_named_and_leave_the_checkpoint(whole, tmp_path) -> None:
    """Of a run that has ended, and in mid-epoch."""
    script, options, ended, last_line = whole
    out, command = tmp_path / "run", f"plain/{script}"
    stop = after_step(7, "os.kill(os.getpid(), signal.SIGTERM)")
    assert 75 in run(edited(script, tmp_path, stop), out, *options)[0]
    others = ["--lr=0.5", "--seed=7", "--epochs=3", "--batch-size=16"]
    for folder, changes in [(ended, others[:2]), *((out, [change]) for change in others)]:
        before = (folder / "last.pt").read_bytes()
        codes, printed = run(command, folder, *options, *changes)
        assert codes == [1] * num_ranks(script), printed
        for change in changes:
            name, _, value = change.removeprefix("--").partition("=")
            assert re.search(rf"'{name.replace('-', '_')}', {value}\b", printed), printed
        assert "resumed" not in printed
        assert str(folder / "last.pt") in printed
        assert (folder / "last.pt").read_bytes() == before
    # What the result does not depend on may change, and the run says where it goes on.
    codes, printed = run(command, out, *options, "--save-every=7")
    assert not any(codes), printed
    assert f"resumed from {out / 'last.pt'}: step 7 of {NUM_STEPS}" in printed
    assert printed.splitlines()[-1] == last_line
    assert_same(out, ended)


def test_a_run_goes_on_after_its_terminal_is_closed_if_it_ignores_that(options, tmp_path) -> None:
    edits = [hang_up_is("SIG_IGN"), after_step(7, "os.kill(os.getpid(), signal.SIGHUP)")]
    assert run(edited(ONE, tmp_path, *edits), tmp_path / "run", *options)[0] == [0]


def test_weights_that_are_not_finite_are_not_saved(options, tmp_path) -> None:
    out = tmp_path / "run"
    spoilt = after_step(7, 'next(model.parameters()).data.fill_(float("nan"))')
    codes, printed = run(edited(ONE, tmp_path, spoilt), out, *options)
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


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_without_bfloat16_computes_in_float32(has_bfloat16, dtype, options, tmp_path) -> None:
    weights = []
    for name, more in (("default", []), ("given", [f"--dtype={dtype}"])):
        command = [f"plain/{AMP}", *options, "--epochs=1", *more, f"--out={tmp_path / name}"]
        watch = partial(cpu_with, {"avx512_bf16": has_bfloat16})
        processes, [prints] = start(command, tmp_path / f"{name}-", 1, REPOSITORY, watch)
        assert join(processes) == [0], prints.read_text()
        weights.append(checkpoint_of(tmp_path / name)["model"])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_run_goes_on_with_another_number_of_ranks(options, tmp_path) -> None:
    out = tmp_path / "run"
    stop = after_step(7, "os.kill(os.getpid(), signal.SIGTERM)")
    assert run(edited(DDP, tmp_path, stop), out, *options)[0] == [75, 75]
    assert run("plain/train.py", out, *options, ranks=1)[0] == [0]
    assert checkpoint_of(out)["step"] == NUM_STEPS


@pytest.mark.slow
def test_the_accuracy_is_that_of_the_template(tmp_path) -> None:
    commands = [["plain/train.py", f"--out={tmp_path / 'plain'}"]]
    commands += [["train.py", f"output_dir={tmp_path / 'template'}", "log.images=0"]]
    printed, _ = run_all(commands, tmp_path)
    [*_, accuracy] = re.findall(r"val/top1 ([\d.]+)", printed)
    assert float(accuracy) >= summary_of(tmp_path / "template")["val/top1"] - 0.005


class Operations(TorchDispatchMode):
    """Writes the operations of each step, from update to update."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__()
        self.path = folder / f"{script.replace('/', '-')}.json"
        self.steps: list[list[str]] = [[]]

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.steps[-1].append(function.name())
        if "_fused_adamw_" in function.name():
            self.steps.append([])
        return function(*arguments, **(options or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.path.write_text(json.dumps(self.steps[1:-1]))


def test_a_step_has_no_more_operations_than_that_of_the_template_and_waits_for_no_gpu(
    options, tmp_path
) -> None:
    """In place of a comparison of speed: on a CPU and a GPU, both call the same kernels."""
    template = ["train.py", f"output_dir={tmp_path / 'template'}", "max_steps=24", "log.images=0"]
    commands = [["plain/train.py", *options, f"--out={tmp_path / 'plain'}"], template]
    run_all(commands, tmp_path, 1, REPOSITORY, partial(Operations, tmp_path))
    plain, expected = (
        sorted(json.loads((tmp_path / name).read_text()), key=len)[10]
        for name in ("plain-train.py.json", "train.py.json")
    )
    # Its batch is cut out of the data in the step; that of the template, in a thread.
    assert len(plain) <= len(expected) + 2
    assert "aten::_local_scalar_dense" not in plain  # which reads a value on the host


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_one_short_file_that_needs_torch_and_numpy_only(script: str) -> None:
    text = (FOLDER / script).read_text()
    assert len(text.splitlines()) <= 150
    assert f"plain/{script}`" in text
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch", "numpy"}


def definitions(script: str) -> dict[str, str]:
    text = (FOLDER / script).read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: str(ast.get_source_segment(text, node)) for node in functions}


def test_the_scripts_differ_where_a_technique_needs_it() -> None:
    one, ddp, amp = (definitions(script) for script in SCRIPTS)
    assert {name for name in amp if amp[name] != ddp[name]} == {"main"}
    changed = {name for name in ddp if ddp[name] != one.get(name)}
    assert changed == {"main", "evaluate"}
    parts = [(FOLDER / script).read_text().splitlines() for script in SCRIPTS]
    for before, after, most in ((parts[0], parts[1], 15), (parts[1], parts[2], 12)):
        assert len([line for line in before if line not in after]) <= most


# The pieces that docs/plain.md offers, each without the rest of its script.


def piece(name: str) -> Any:
    """A function of the script with DDP, with the imports of its file and nothing else."""
    imports = re.findall(r"^(?:import|from) .*", (FOLDER / DDP).read_text(), re.MULTILINE)
    names: dict[str, Any] = {}
    exec("\n".join([*imports, definitions(DDP)[name]]), names)
    return names[name]


def test_the_page_names_every_piece_with_its_lines() -> None:
    rows = {row[1].strip("`"): int(row[2]) for row in rows_of(PAGE, "Pieces to copy")}
    found = {name: len(text.splitlines()) for name, text in definitions(DDP).items()}
    found["evaluate"] += 1  # its decorator
    assert rows == {name: found[name] for name in rows}
    assert set(rows) == found.keys() - {"main", "build_model"}


def test_piece_sampler() -> None:
    batches_of = piece("batches_of")
    batches = batches_of(epoch=3, seed=1, num_samples=26, batch_size=4)
    samples = torch.cat(batches).tolist()
    assert len(set(samples)) == len(samples) == 24
    assert set(samples) < set(range(26))
    assert torch.cat(batches_of(3, 1, 26, 4)).tolist() == samples
    for other in ((4, 1), (3, 2)):
        assert torch.cat(batches_of(*other, 26, 4)).tolist() != samples


def test_piece_atomic_saving(tmp_path) -> None:
    save, path = piece("save"), tmp_path / "new" / "last.pt"
    save({"step": 1}, path)
    with pytest.raises(AttributeError, match="pickle"):
        save({"step": 2, "f": lambda: 0}, path)
    assert torch.load(path) == {"step": 1}


def test_piece_preemption() -> None:
    with signal_handlers_restored():
        received = piece("remember_signals")()
        assert received == []
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGTERM, signal.SIGUSR1]


def use_pieces(rank: int, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = nn.BatchNorm1d(3, affine=False, eps=0)
    assert model.running_mean is not None
    model.running_mean.fill_(float(rank))
    inputs, labels = torch.arange(21.0).sin().view(7, 3), torch.arange(7) % 3
    found = piece("evaluate")(model, TensorDataset(inputs, labels), torch.device("cpu"))
    accuracy = (inputs.argmax(1) == labels).double().mean()
    # With the statistics of rank 0, by which the model changes nothing.
    assert found == pytest.approx([float(cross_entropy(inputs, labels)), float(accuracy)])
    dist.destroy_process_group()


def test_pieces_buffers_and_sums_of_metrics_on_two_ranks() -> None:
    port = free_port()
    assert join([start_process(use_pieces, rank, port) for rank in (0, 1)]) == [0, 0]
