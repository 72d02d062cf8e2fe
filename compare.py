"""Find the first thing that two runs compute differently, and its likely cause.

    python compare.py train.py train_ddp.py model.kwargs.batch_norm=false
    python compare.py train.py mine.py steps=5 data.root=PHOTOS -- optimizer.lr=0.01
    python compare.py train_ddp.py train_ddp.py ranks=1,2
    python compare.py run=outputs/a run=outputs/b     # two finished runs: settings, versions, logs

Two scripts beside this one train for `steps` (3) steps and evaluate, in deterministic mode, without
dropout. Samples of ranks and micro-batches are put together; scripts that torchrun starts have
`ranks` (2) ranks. Overrides after -- are the second script's alone. Exit code 1: a difference.
"""

import math
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from conf.cli import user_errors
from conf.errors import UserError
from conf.options import parse_options
from runtime.computed import Computed, read_log, read_recorded, recorded

SETTINGS = ["deterministic=true", "fp32_precision=ieee", "model.compile=false", "log.images=0"]
SETTINGS += ["log.every_steps=1", "log.to=[tensorboard]", "ema.decay=0", "amp.init_scale=256"]
ROUNDING = {"float32": 1e-5, "float16": 5e-2, "bfloat16": 0.4}  # relative, in the first step
START, LOCAL, USED = "weight before the step", "gradient before averaging", "gradient in the step"
CAUSES = {
    START: "another model or seed, or a seed of the rank before the model is built",
    "samples": "another order, by seed or shares of ranks, or another crop, decoder or scaling",
    "random numbers": "all ranks have the same dropout: seed_everything() without the rank",
    "output of": "another layer or precision, F.dropout, or a layer that sees others of its batch",
    "train/loss": "other targets, another loss, or not a mean over all samples, as with weights",
    LOCAL: "another loss than is recorded, or a change before backward()",
    "train/grad_norm": "gradients not cleared, cleared too often or changed, or a norm of some",
    USED: "clipping, or a change between backward() and optimizer.step()",
    "learning rate": "optimizer.lr, warm-up or length of the schedule",
    "weight after the step": "another optimizer, weight decay or momentum, or a change beside it",
    "evaluated weight": "other weights are evaluated than trained",
    "evaluated samples": "samples that are left out or repeated, or another validation split",
    "output in evaluation of": "another precision in evaluation",
    "val/loss": "sums that are not added over all ranks: dist.all_reduce(totals)",
}
"""What is compared, in this order, and the likely cause where nothing more is known."""


class Difference(NamedTuple):
    """The first thing that two runs compute differently."""

    step: int
    what: str
    size: float  # relative to the larger L2 norm
    rounding: float
    cause: str


def first_difference(one: Computed, two: Computed) -> tuple[Difference | None, float]:
    """Return the first difference beyond rounding, if any, and the largest one within it."""
    largest, precisions, clear = 0.0, {one.precision, two.precision}, dict[str, Any]()
    fewer, more = sorted((one, two), key=lambda run: len(run.steps))
    for at, (first, second) in enumerate(zip(one.steps, two.steps, strict=False)):
        allowed = max(ROUNDING[name] for name in precisions) * 2**at  # it grows from step to step
        for kind in CAUSES:
            if kind == "evaluated weight" and len(fewer.steps) == at + 1 < len(more.steps):
                cause = f"{fewer.name} lacks train_loader.set_epoch(epoch): no further epoch"
                return Difference(at + 2, "number of steps", math.inf, 0, cause), largest
            ours, theirs = first[kind], second[kind]
            if not ours or not theirs or (kind == LOCAL and "float16" in precisions):
                continue
            top = max(value.norm().item() for value in ours.values())
            for name in ours | theirs:
                whole, size = name.partition(" on rank ")[0], math.inf
                a, b = (values.get(name, values.get(whole)) for values in (ours, theirs))
                if (a is None or b is None) and kind.startswith("output"):
                    continue
                if a is not None and b is not None and a.shape == b.shape:
                    if "weight" in kind:
                        a, b = (value * clear.get(whole, 1) for value in (a, b))
                    least = 0.1 * top if kind in (LOCAL, USED) else 1e-30
                    size = (a - b).norm().item() / max(a.norm().item(), b.norm().item(), least)
                    if kind == USED:  # Adam makes a whole step of a gradient that is rounding
                        is_clear = a.abs() * len(a) ** 0.5 > allowed * top
                        clear[whole] = is_clear & clear.get(whole, is_clear)
                if size > allowed:
                    what, cause = f"{kind} {name}", cause_of(kind, name, at, one, two, a, b)
                    return Difference(at + 1, what.strip(), size, allowed, cause), largest
                largest = max(largest, size)
    return None, largest


def cause_of(kind: str, name: str, at: int, one: Computed, two: Computed, a: Any, b: Any) -> str:
    """Return the likely cause of a difference in the step at this place in `steps`."""
    if a is None or b is None:
        has = "another model" if kind == START else "it frozen, unused or left out"
        return f"{one.name if a is None else two.name} has {has}"
    ratio = (b.norm() / a.norm()).item() if a.shape == b.shape and a.norm() > 0 else 0.0
    more, times = (two.name, ratio) if ratio > 1 else (one.name, 1 / (ratio or 1))
    is_multiple = ratio > 0 and bool((b - ratio * a).norm() < 0.1 * b.norm())
    ranks = {one.num_ranks, two.num_ranks} - {1}
    count = one.steps[at]["samples"]["count"][0].item()
    is_used, is_rank = kind in ("train/grad_norm", USED), " on rank " in name
    likely = []
    for run, other, value in ((two, one, b), (one, two, a)):
        now, used = run.steps[at], run.steps[at][USED]
        shares = list(now["samples of a rank"].values())
        if kind == "samples" and len(shares) > 1 and all(s.equal(shares[0]) for s in shares):
            likely.append(f"all ranks of {run.name} load the same: build_loaders() without rank")
        if is_used and any(not used[n].equal(used[n.partition(" on rank ")[0]]) for n in used):
            likely.append(f"{run.name} does not average the gradients: each rank has its own")
        for n, step in enumerate(other.steps, 1):
            if kind == "learning rate" and n != at + 1 and step[kind][name].equal(value):
                likely.append(f"{run.name} has that of step {n}: scheduler.step() is misplaced")
        is_average = kind == "evaluated weight" and not is_rank
        if is_average and torch.allclose(now[START][name] * (value != 0), value):
            likely.append(f"{run.name} updates the EMA before optimizer.step()")
        if name.startswith("in training mode") and value.any():
            likely.append(f"{run.name} evaluates without model.eval()")
        if kind == "val/loss" and not now["evaluated samples"]:
            likely.append(f"{run.name} evaluates another object than the model that is trained")
    if kind == START and at:
        likely.append("a change since the last step, such as an average that is not swapped back")
    if kind == "output of" and "BatchNorm" in name:
        likely.append("BatchNorm without sync: each rank, or micro-batch, has its own statistics")
    if kind == "evaluated weight" and is_rank:
        likely.append("buffers are not broadcast before evaluation: sync_buffers(state)")
    if kind == "learning rate":
        likely.append(f"it is {times:.6g} times as high in {more}: {CAUSES[kind]}")
    factors = ranks if is_used else {count, *(count / n for n in ranks)}
    is_factor = is_multiple and any(math.isclose(times, n, rel_tol=0.01) for n in factors)
    if is_factor and kind == "train/loss":
        likely.append(f"the loss of {more} is a sum over the samples, not their mean")
    if is_factor and is_used:
        likely.append(f"{more} adds the gradients over ranks, or the other one averages them twice")
    if is_multiple and is_used and times > 16 and "float16" in (one.precision, two.precision):
        likely.append(f"{more} clips the gradients before scaler.unscale_()")
    return [*likely, CAUSES[kind]][0]


def record(script: str, num_ranks: int, folder: Path, steps: int, overrides: list[str]) -> Computed:
    """Train a script for some steps, and record what it computes."""
    folder.mkdir()
    command = [sys.executable]
    if "torchrun" in Path(script).read_text():
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [__file__, "record", str(folder), script, *SETTINGS]
    command += [f"max_steps={steps}", f"output_dir={folder / 'run'}", *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise UserError(f"{script} has ended with exit code {done.returncode}, see above")
    return read_recorded(folder, script, folder / "run")


def compare_scripts(arguments: list[str]) -> bool:
    """Train two scripts, and print their first difference; return True if there is one."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    scripts = [a for a in arguments[:place] if a.endswith(".py") and "=" not in a]
    rest = [a for a in arguments[:place] if a not in scripts]
    options, overrides = parse_options(__doc__, rest, steps="3", ranks="2")
    if len(scripts) != 2:
        raise UserError("compare.py takes two scripts, or run= twice; --help shows examples")
    try:
        steps, *ranks = [int(n) for n in [options["steps"], *options["ranks"].split(",")]]
    except ValueError:
        raise UserError(f"{options}: use numbers, such as steps=3 ranks=2 or ranks=1,2") from None
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, "1st"), Path(folder, "2nd")]
        one = record(scripts[0], ranks[0], folders[0], steps, overrides)
        overrides += arguments[place + 1 :]
        two = record(scripts[1], ranks[-1], folders[1], steps, overrides)
    if one.name == two.name:
        one, two = one._replace(name=f"1st {one.name}"), two._replace(name=f"2nd {two.name}")
    difference, largest = first_difference(one, two)
    names = " and ".join(f"{run.name} (ranks: {run.num_ranks})" for run in (one, two))
    if difference is None:
        print(f"{names}: equal to {largest:.0e} in {len(one.steps)} steps and evaluation")
        return False
    print(f"{names}: first difference: step {difference.step}, {difference.what}")
    print(f"by {difference.size:.2g}, where rounding explains {difference.rounding:.0e}")
    print(f"likely cause: {difference.cause}")
    return True


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_group = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if is_group else {prefix + key: value}
    return found


def compare_runs(folders: list[Path]) -> bool:
    """Print how two finished runs differ; return True if their logs do."""
    about = []
    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise UserError(f"run={folder} is not the folder of a finished run")
        files = [folder / name for name in ("config.yaml", "run.json", "summary.json")]
        config, run, summary = (yaml.safe_load(file.read_text()) for file in files)
        summary = {key: summary[key] for key in ("versions", "device", "world_size", "bad_steps")}
        about.append(flat(config | run | summary | {"settings": 0, "name": 0, "output_dir": 0}))
    for key in about[0] | about[1]:
        first, second = (values.get(key) for values in about)
        if first != second:
            print(f"{key}: {first} and {second}")
    a, b = map(read_log, folders)
    places = sorted((step, tag) for tag, step in a.keys() & b.keys() if not tag.startswith("perf"))
    for step, tag in places:
        first, second = a[tag, step], b[tag, step]
        if not math.isclose(first, second, rel_tol=1e-6) and str(first) != str(second):
            print(f"the logs differ from step {step} on: {tag} {first:.7g} and {second:.7g}")
            return True
    print(f"the logs are equal to 1e-6 in {len(places)} values")
    return False


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["record"]:  # in a process of its own
        folder, sys.argv = Path(arguments[1]), arguments[2:]
        with recorded(folder):
            runpy.run_path(sys.argv[0], run_name="__main__")
        return
    folders = [Path(a.partition("=")[2]) for a in arguments if a.startswith("run=")]
    sys.exit(compare_runs(folders) if len(folders) == 2 else compare_scripts(arguments))


if __name__ == "__main__":
    with user_errors():
        main()
